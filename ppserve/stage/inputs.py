"""From a plan to the arrays that all layers share: once per step, before the hidden states arrive.

The arrays are the model's business, so they are made there; this is the stage's name for it.
"""

from ppserve.model.inputs import StepInputs, build_inputs

__all__ = ["StepInputs", "build_inputs"]
