"""What `triptych doctor` looks at: small functions, each from a `Machine` and what is wanted of it to one `Finding`."""
