"""Every figure, table and numbered claim of the papers, by one call each: ``ca.paper(id)``."""

from curvatlas.studies.papers.exhibits import paper
from curvatlas.studies.papers.reproduction import Finding, Reproduction

__all__ = ["Finding", "Reproduction", "paper"]
