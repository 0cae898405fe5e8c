"""Our transports against memcpy, raw pyzmq, gRPC, NIXL and Mooncake, and what a request feels of them."""
