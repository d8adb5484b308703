"""Row 4 and what row 3 says of links: two hosts made of network namespaces, and a cable between them."""

from __future__ import annotations

import subprocess
import time
from typing import Any

from benchmarks.chaos.record import Record
from tests.hosts.two_hosts import ADDRESSES, TwoHosts, two_hosts, why_not

_NUM_TOKENS = 600


def hosts_lost(record: Record, short: bool) -> dict[str, Any]:
    """4: a host is lost and comes back; the cable is out for 20 s; the link becomes slow and loses packets."""
    if (missing := why_not()) is not None:
        return {"met": None, "skipped": missing}
    pauses_s: dict[str, float] = {}
    away_s = (1.0, 30.0) if short else (1.0, 30.0, 300.0)
    with two_hosts() as hosts:
        head = hosts.torchrun(0, ADDRESSES[0])
        worker = hosts.torchrun(1, ADDRESSES[0])
        target = hosts.wait_ready(head)
        whole = hosts.stream(target, _NUM_TOKENS).text
        wrong = 0

        def hurt_by(name: str, fault: Any) -> None:
            nonlocal wrong
            record.note("fault", name=name)
            seen = hosts.stream(target, _NUM_TOKENS, fault)
            pauses_s[name] = seen.longest_pause_s
            wrong += seen.text != whole

        for seconds in away_s:

            def lose_it(seconds: float = seconds) -> None:
                nonlocal worker
                worker.end()
                time.sleep(seconds)
                worker = hosts.torchrun(1, ADDRESSES[0])

            hurt_by(f"host away {seconds:g} s", lose_it)
        hurt_by("cable out 20 s", lambda: hosts.pull_cable(20.0))
        deaths = head.log.count(" died")
        slow = hurt_link(hosts)
        if slow is None:
            hurt_by("200 ms and 5% loss", lambda: None)
        same_head = head.process.poll() is None and head.log.count("ppserve ready") == 1
    record.close()
    told = {name: round(pause, 1) for name, pause in pauses_s.items()}
    return {
        "longest_pause_s": told,
        "wrong": wrong,
        "head_stayed": same_head,
        "slow_link": slow or f"{head.log.count(' died') - deaths} deaths",
        "met": not wrong and same_head,
    }


def hurt_link(hosts: TwoHosts) -> str | None:
    """Why the link cannot be made slow; None if it is."""
    words = ["tc", "qdisc", "add", "dev", "eth0", "root", "netem", "delay", "200ms", "loss", "5%"]
    try:
        done = subprocess.run(["ip", "netns", "exec", hosts.namespaces[1], *words], capture_output=True, text=True)
    except FileNotFoundError:
        return "the program `tc` is missing"
    return done.stderr.strip().splitlines()[-1] if done.returncode else None


ROWS = {4: hosts_lost}
