"""Which workers serve a request. Pure: no clock, no event loop, no gRPC; what serves is what the simulator drives
(`benchmarks/routing`).

    prompt.py       what is asked, as far as routing goes: numbers of pages and pictures
    index.py        what each worker holds, by its own account (its feed)
    homes.py        who was given what, before its feed says so; sessions
    outstanding.py  what this router has given to each worker and not heard of the end
    board.py        both, as one immutable view of each worker
    forecast.py     what a path would take, in seconds: waiting, encoding, computing, sending
    filters.py      what a path should not be: avoided, full, saturated
    scorers.py      what speaks for one path against another, in seconds
    picker.py       the order in which to ask
    routing.py      all of it, for the pipeline
"""
