"""The load generator and its reports: `ppserve bench`, and the terminal view `ppserve top`.

Never anything of the server. The view is here because it reads a running server as a measurement does.

    caller      one connection; one request and the times at which its tokens arrived
    measure     one run: requests from a seed, warm-up, a closed or an open loop, and the ledger before and after
    summary     the figures that people compare, as a table and as JSON
    ledger      where the stages' time went, over an interval
    top         what `ppserve top` reads and shows
"""
