"""Who am I: the groups, ranks and neighbours of this process, under the name that Megatron-LM's module has.

It is for programs in this repository, such as the tour. `ppserve/stage/parallel_state.py` is the module itself,
and keeps the one state that there is; an installed ppserve puts no module of this name beside others.
"""

from ppserve.stage.parallel_state import *  # noqa: F403
