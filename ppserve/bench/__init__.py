"""The load generator and its reports: `ppserve bench`, and the terminal view `ppserve top`.

Never anything of the server.

    workload    what is asked: lengths, prompts, arrival times; seeded, no clock
    caller      one connection; one request and the times of what came back
    load        who asks when: closed loop, open loop
    summary     measurements into the figures that people compare
    report      figures as a table, JSON, CSV
    ledger      where the stages' time went, over an interval
    scrape      the server's /metrics page, read without a client library
    plot        pictures (needs matplotlib)
    top         the live view
"""
