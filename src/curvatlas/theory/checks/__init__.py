"""The checks behind ``curvatlas verify``: a module a topic, a function a statement."""
