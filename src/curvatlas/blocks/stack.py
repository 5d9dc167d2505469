r"""Exact products with the Hessian of a whole stack of blocks, no autograd graph anywhere.

    stack = BlockStack([(spec, weights), ...], loss="cross_entropy", readout=Readout(weight=W))
    here = stack.linearise(x, targets)         # one forward and one backward pass, kept
    here.value, here.gradient                  # loss (), flat gradient (P,)
    here.product(v)                            # H v;  part="outer": H_o v,  "functional": H_f v
    here @ V                                   # columns (P, K)

Tangents run forward block by block, adjoints and their tangents run back (THEORY 9): passing ẋ in
and (δ_x, Rδ_x) out of each block composes exactly. The flat order is block by block in the order
of ``WEIGHT_NAMES``, then the readout, then, if asked for, the stack's input.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from curvatlas.blocks.adapters import FlatOrder
from curvatlas.blocks.adapters_stack import map_stack
from curvatlas.blocks.losses import Loss, resolve_loss
from curvatlas.blocks.products import LinearisedBlock
from curvatlas.blocks.products_check import check_spec
from curvatlas.blocks.products_head import LinearisedReadout, Readout
from curvatlas.blocks.stack_products import LinearisedStack
from curvatlas.blocks.structure import WEIGHT_NAMES, BlockSpec, Weights


class BlockStack:
    """Blocks in a row, a readout and a loss.

    ``blocks``: (spec, weights) pairs. ``readout``: final norm, pooling, linear head (all optional).
    ``loss``: ``"mse"``, ``"cross_entropy"``, or a ``curvatlas.blocks.losses.Loss`` of the outputs.
    """

    def __init__(
        self,
        blocks: Sequence[tuple[BlockSpec, Weights]],
        *,
        loss: str | Loss = "mse",
        readout: Readout | None = None,
    ) -> None:
        if not blocks:
            raise ValueError("a stack needs at least one block.")
        widths = {spec.d_model for spec, _ in blocks}
        if len(widths) > 1:
            raise ValueError(f"all blocks of a stack share one width, got {sorted(widths)}.")
        self.specs = tuple(spec for spec, _ in blocks)
        for spec in self.specs:
            check_spec(spec)
        self.weights: list[dict[str, Tensor]] = [
            {name: weights[name].detach() for name in WEIGHT_NAMES if name in weights}
            for _, weights in blocks
        ]
        self.readout = readout if readout is not None else Readout()
        self.loss = resolve_loss(loss)
        self.order: FlatOrder | None = None  # set by from_module

    @classmethod
    def from_module(
        cls, module: nn.Module, *, loss: str | Loss = "mse", head: bool = True
    ) -> BlockStack:
        """The blocks, final norm and linear head of a model; the input is the embeddings' output.

        Reads ``nn.TransformerEncoder``, the zoo's ViT and GPT, and Hugging Face GPT-2, Llama, BERT
        and ViT models. ``head=False`` leaves the head away. A head tied to the embedding stays in
        the function but is no parameter of the stack: its other use lies outside. ``stack.order``
        translates between the stack's flat vectors and the model's.
        """
        mapped = map_stack(module, head=head)
        stack = cls(mapped.blocks, loss=loss, readout=mapped.readout)
        stack.order = mapped
        return stack

    @property
    def named_weights(self) -> dict[str, Tensor]:
        """``blocks.0.query_weight`` … ``readout.bias`` → tensor, in flat order."""
        named = {
            f"blocks.{i}.{name}": weight
            for i, weights in enumerate(self.weights)
            for name, weight in weights.items()
        }
        return named | {f"readout.{k}": v for k, v in self.readout.weights.items()}

    @property
    def size(self) -> int:
        """The number of parameters P."""
        return sum(weight.numel() for weight in self.named_weights.values())

    def linearise(
        self,
        x: Tensor,
        targets: Tensor,
        *,
        mask: Tensor | None = None,
        include_input: bool = False,
        include_weights: bool = True,
        parts: int | None = None,
    ) -> LinearisedStack:
        """Evaluate at inputs x (n, L, d), keeping activations and adjoints for products.

        ``include_input`` appends the input's n·L·d numbers to the flat vector;
        ``include_weights=False`` leaves only them. ``parts``: how many groups of samples go
        through one after the other in a product (None: by size); the tangents need memory for one.
        """
        return LinearisedStack(
            self,
            x,
            targets,
            mask=mask,
            include_input=include_input,
            include_weights=include_weights,
            parts=parts,
        )

    def forward(self, x: Tensor, *, mask: Tensor | None = None) -> Tensor:
        """The outputs (n, L, C), or (n, 1, C) after a pooling."""
        x = x.detach().unsqueeze(0) if x.ndim == 2 else x.detach()
        for spec, weights in zip(self.specs, self.weights, strict=True):
            x = LinearisedBlock(spec, weights, x, mask).output
        samples = x.shape[0]
        return LinearisedReadout(self.readout, x.flatten(0, 1), samples=samples).output
