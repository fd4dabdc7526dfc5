"""A model as its caches see it, and the cache groups that follow."""

from __future__ import annotations

from dataclasses import dataclass

from .._checks import require_int
from ..errors import InvalidSpecError, UnknownModelError, shown
from ..specs import AttentionSpec, MambaMode, MambaSpec, SlidingWindowSpec
from .caches import Layer, part_of_rank
from .formats import KNOWN_DTYPES
from .groups import KeptCache, ModelCut, ModelGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCaches:
    """What a model keeps, layer by layer.

    Attributes:
        model_type: The family's name.
        layers: What each layer keeps.
        draft_layers: What the layers keep that predict further tokens (MTP).
        draft_doubt: Why that is not known, where the config has such layers; else empty.
        max_positions: The longest request that the model was made for, where the config says.
        dtype: The model's dtype, where the config says.
        cache_dtype: The dtype that the config declares for keys and values, if any.
        cache_doubt: Why what it declares is not known; else empty.
        state_dtype: The dtype of recurrent states.
    """

    model_type: str
    layers: tuple[Layer, ...]
    draft_layers: tuple[Layer, ...] = ()
    draft_doubt: str = ""
    max_positions: int | None = None
    dtype: str | None = None
    cache_dtype: str | None = None
    cache_doubt: str = ""
    state_dtype: str = "float32"

    def groups(
        self,
        *,
        block_size: int = 64,
        cache_dtype: str | None = None,
        model_dtype: str | None = None,
        state_dtype: str | None = None,
        tp: int = 1,
        num_speculative_tokens: int = 0,
        mamba_block_size: int | None = None,
        mamba_mode: MambaMode = "none",
    ) -> tuple[ModelGroup, ...]:
        """Return the model's cache groups, as one tensor-parallel rank keeps them.

        Latents and their index keys share a table, so do all layers of full attention, the
        layers of one window, and all recurrent layers. Draft layers count where drafts are on.

        Args:
            block_size: Tokens of a block.
            cache_dtype: The dtype of keys, values and latents; by default what the config
                declares for its cache, else the model's.
            model_dtype: The model's dtype; by default what the config says.
            state_dtype: The dtype of recurrent states; by default what the config says, else
                float32.
            tp: Tensor-parallel ranks.
            num_speculative_tokens: Drafts of a request in a step.
            mamba_block_size: Tokens between two kept states; ``block_size`` by default.
            mamba_mode: Whether states are kept along the way.

        Raises:
            UnknownModelError: The bytes of something are not known.
            InvalidSpecError: An argument is out of range, or does not suit the model.
        """
        require_int("block_size", block_size, minimum=1)
        require_int("tp", tp, minimum=1)
        require_int("num_speculative_tokens", num_speculative_tokens, minimum=0)
        if mamba_block_size is not None:
            require_int("mamba_block_size", mamba_block_size, minimum=1)
        own_dtype = self.dtype if model_dtype is None else model_dtype
        layers = self.layers
        if num_speculative_tokens:
            if self.draft_doubt:
                raise UnknownModelError(
                    f"{self.draft_doubt} for {self.model_type}; plan without drafts, or give "
                    "the groups with --group",
                    model_type=self.model_type,
                )
            layers += self.draft_layers
        kept = [
            KeptCache(place, part_of_rank(cache, tp))
            for place, layer in enumerate(layers)
            for cache in layer
        ]
        num_drafts = len(layers) - len(self.layers)
        cut = ModelCut(
            layers, num_drafts, kept, block_size, self._cache_dtype(cache_dtype, own_dtype)
        )
        groups = [
            cut.latents(),
            cut.attention("attention", AttentionSpec(block_size=block_size), None),
            *(
                cut.attention(
                    f"window {window}",
                    SlidingWindowSpec(block_size=block_size, window=window),
                    window,
                )
                for window in cut.windows()
            ),
            cut.states(
                MambaSpec(
                    block_size=block_size if mamba_block_size is None else mamba_block_size,
                    mode=mamba_mode,
                    num_speculative_blocks=num_speculative_tokens,
                ),
                self.state_dtype if state_dtype is None else state_dtype,
                own_dtype,
            ),
        ]
        found = tuple(group for group in groups if group is not None)
        if not found:
            raise InvalidSpecError(
                "no layer of the model keeps anything", model_type=self.model_type
            )
        return found

    def _cache_dtype(self, asked: str | None, own_dtype: str | None) -> str | None:
        """Return the dtype of keys, values and latents; None where nothing names one."""
        if asked is not None and asked != "auto":
            name: str | None = asked
        elif self.cache_doubt:
            raise UnknownModelError(
                f"quantization_config: {self.cache_doubt}; give --cache-dtype",
                key="quantization_config",
            )
        else:
            name = own_dtype if self.cache_dtype is None else self.cache_dtype
        if name is not None and name not in KNOWN_DTYPES:
            raise InvalidSpecError(
                f"dtype {shown(name)} is not known; known are auto, {', '.join(KNOWN_DTYPES)}",
                dtype=name,
            )
        return name
