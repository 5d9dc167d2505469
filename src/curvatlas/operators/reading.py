"""Layers of torch and of model libraries as a description with weights, for the closed forms.

The recognition itself belongs to the product engine; what stands behind it reads it here.
"""

from curvatlas.engines.tangent.reading import MappedBlock, MappedNorm, map_module, map_norm

__all__ = ["MappedBlock", "MappedNorm", "map_module", "map_norm"]
