"""Answers of a given form: which tokens may follow those that an answer has. Never a request, a clock or a tensor.

No other room imports llguidance. It is imported with the first form, as the import would delay a head's start by
78 ms.

StructuredOutput   the form that a request asks for; FormRefused says why it is not served, and where
Vocabulary         the bytes of each token of a model
Grammars           compiles forms, first in a process with limits, and keeps them
GrammarFilter      the tokens that one sequence may have next: a mask, the length of a good draft, forced tokens
"""
