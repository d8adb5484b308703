"""Row 4 and what row 3 says of links: two hosts made of network namespaces, and a cable between them."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

from benchmarks.chaos.record import Record
from tests.hosts.cable import Cable, why_no_cable
from tests.hosts.two_hosts import ADDRESSES, two_hosts, why_not

_NUM_TOKENS = 600


def hosts_lost(record: Record, short: bool) -> dict[str, Any]:
    """4: a host is lost and comes back; the cable is out for 20 s; the link loses all of one way, then becomes
    slow and loses some."""
    if (missing := why_not()) is not None:
        return {"met": None, "skipped": missing}
    pauses_s: dict[str, float] = {}
    away_s = (1.0, 30.0) if short else (1.0, 30.0, 300.0)
    with two_hosts(slow_cable=why_no_cable() is None) as hosts:
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

        def lose_it(seconds: float) -> None:
            nonlocal worker
            worker.end()
            time.sleep(seconds)
            worker = hosts.torchrun(1, ADDRESSES[0])

        def lose_it_unheard(cable: Cable) -> None:
            nonlocal worker
            cable.loss = [1.0, 1.0]
            worker.end()
            time.sleep(15.0)
            cable.loss = [0.0, 0.0]
            worker = hosts.torchrun(1, ADDRESSES[0])

        for seconds in away_s:
            hurt_by(f"host away {seconds:g} s", partial(lose_it, seconds))
        hurt_by("cable out 20 s", lambda: hosts.pull_cable(20.0))
        deaths = 0
        if (cable := hosts.slow) is not None:
            hurt_by("host lost, and the end of its connections with it", partial(lose_it_unheard, cable))
            deaths = head.log.count(" died")
            for sender, each_way in enumerate([(1.0, 0.0), (0.0, 1.0)]):
                hurt_by(f"nothing from host {sender} for 5 s", partial(hurt_link, cable, 5.0, each_way))
            cable.delay_s, cable.loss = 0.1, [0.05, 0.05]
            hurt_by("200 ms there and back, 5% loss each way", lambda: None)
            cable.delay_s, cable.loss = 0.0, [0.0, 0.0]
        deaths = head.log.count(" died") - deaths
        same_head = head.process.poll() is None and head.log.count("ppserve ready") == 1
    record.close()
    told = {name: round(pause, 1) for name, pause in pauses_s.items()}
    return {
        "longest_pause_s": told,
        "wrong": wrong,
        "head_stayed": same_head,
        "deaths_by_the_link": deaths if cable else why_no_cable(),
        "met": not wrong and same_head,
    }


def hurt_link(cable: Cable, seconds: float, each_way: tuple[float, float]) -> None:
    """Loses these shares of frames for so long."""
    cable.loss = list(each_way)
    time.sleep(seconds)
    cable.loss = [0.0, 0.0]


ROWS = {4: hosts_lost}
