"""The papers, statement by statement: one file a theorem family, to be read beside the paper."""
