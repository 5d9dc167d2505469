"""The checks behind ``curvatlas verify``: a module a topic, a function a statement.

What each statement says, and the verdict recorded for it, stands in ``theory/statements.json``.
"""
