"""Who is who: every parameter slice of a model with its layer, sublayer and role."""

from curvatlas.anatomy.reading import anatomy_of
from curvatlas.anatomy.slices import Anatomy, Selection, Slice

__all__ = ["Anatomy", "Selection", "Slice", "anatomy_of"]
