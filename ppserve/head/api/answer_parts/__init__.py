"""Answers as their parts: text, reasoning and calls of tools, as models write them. Never a protocol's message.

Tooling        the tools that a request offers, and which of them must be called
AnswerFormat   how a model writes calls and reasoning: chosen by its chat template or by the operator
AnswerPlan     what that means for one request: the form of its answers, and a parser for each
AnswerParser   makes parts of an answer's text as it comes

A further format is one file with a `ToolFormat`, and a line in `formats.py`.
"""
