"""Runner of models that attend in both directions: each step has whole texts, and gives a vector for each.

L rows of a text, E hidden.
"""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as torch_functional

from ..checkpoint.files import open_regular
from ..checkpoint.safetensors import TensorEntry, read_header
from ..checkpoint.tensor_io import DTYPES, bytes_of, read_fully, refuse_non_finite
from ..core.request import Request
from ..core.step import ProfiledRunner, ScheduledRequest, StepPlan, StepResult
from ..errors import ModelError
from ..gguf.folder import gguf_of
from ..gguf.reader import read_gguf
from ..gguf.tensors import read_tensor
from ..model.decoder import Decoder
from ..model.encoder import Encoder
from ..model.forward_context import ForwardContext, TaskRows
from ..model.rotary import Rotary
from ..model_config.encoders.config import DenseActivation, DenseLayer, EncoderPooling, EncoderVectors
from ..sampling_params import SamplingParams
from .input_batch import PooledRows, StepBatch, build_batch
from .prompt_results import read_sums, sum_states

_FUNCTIONS: dict[DenseActivation, torch.nn.Module] = {
    "Identity": torch.nn.Identity(),
    "Tanh": torch.nn.Tanh(),
    "ReLU": torch.nn.ReLU(),
    "GELU": torch.nn.GELU(),
}


class VectorDense:
    """Dense layer over a pooled vector, in float32. The constructor reads its weights. Raises ModelError."""

    def __init__(self, layer: DenseLayer) -> None:
        name, read = layer.gguf_tensor or "linear", _reader(layer)
        self._weight = read(f"{name}.weight", (layer.outputs, layer.inputs))
        self._bias = read(f"{name}.bias", (layer.outputs,)) if layer.has_bias else None
        self._function = _FUNCTIONS[layer.activation]

    def __call__(self, vector: Tensor) -> Tensor:
        result: Tensor = self._function(torch_functional.linear(vector, self._weight, self._bias))
        return result


def _reader(layer: DenseLayer) -> Callable[[str, tuple[int, ...]], Tensor]:
    """Return what reads a tensor of the layer, by name and shape, in float32. Raises ModelError."""
    if not layer.gguf_tensor:
        return partial(_read, layer.file, read_header(layer.file))
    folder, model = layer.file.parent, layer.file.parents[1]
    file = gguf_of(model)
    if file is None:
        raise ModelError(f"{folder}/config.json names a tensor of a GGUF file, which {model} has not")
    return partial(read_tensor, read_gguf(file))


def _read(file: Path, entries: dict[str, TensorEntry], name: str, shape: tuple[int, ...]) -> Tensor:
    entry = entries.get(name)
    if entry is None or entry.shape != shape or entry.dtype not in DTYPES:
        found = "is missing" if entry is None else f"is {entry.dtype} of shape {list(entry.shape)}"
        raise ModelError(f"{file}: tensor {name} {found}; config.json beside it asks for {list(shape)}")
    buffer = torch.empty(entry.nbytes, dtype=torch.uint8)
    try:
        with open_regular(file, buffering=0) as stream:
            stream.seek(entry.offset)
            read_fully(stream.readinto, bytes_of(buffer), entry)
    except OSError as error:
        raise ModelError(f"{file} cannot be read: {error.strerror}") from None
    tensor = buffer.view(DTYPES[entry.dtype]).view(shape).float()
    refuse_non_finite(tensor, entry, "")
    return tensor


def pool_states(states_LE: Tensor, pooling: EncoderPooling) -> Tensor:
    """Pool the states of one text, in float32."""
    match pooling:
        case "cls":
            return states_LE[0].float()
        case "last":
            return states_LE[-1].float()
        case "max":
            return states_LE.amax(0).float()
        case "mean":
            return states_LE.double().mean(0).float()
        case "weighted":
            weights_L = torch.arange(1, len(states_LE) + 1, dtype=torch.float64)
            return (weights_L @ states_LE.double() / weights_L.sum()).float()


class EncoderRunner:
    """Runner of one encoder. States come to the host, where they are pooled."""

    def __init__(
        self,
        model: Encoder | Decoder,
        rotary: Rotary,
        vectors: EncoderVectors,
        *,
        context: int,
        block_size: int,
        device: torch.device,
    ) -> None:
        self._model = model
        self._pooling = vectors.pooling
        self._dense = [VectorDense(layer) for layer in vectors.dense]
        self._block_size, self._context, self._device = block_size, context, device
        self._has_classifier = isinstance(model, Encoder) and model.classifier is not None
        self._has_types = isinstance(model, Encoder) and model.encoder.type_rows > 1
        # All positions at once: torch may compute a cosine differently in a tensor of another length.
        self._cos_APD, self._sin_APD = rotary.rows(torch.arange(context, device=device))

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Execute one step, whose rows are whole texts."""
        batch = build_batch(plan.rows, self._block_size, self._device)
        states_TE = self._model.hidden(self._forward(batch, plan.rows), None)
        if not self._has_classifier:
            states_TE = states_TE.cpu()
        result = StepResult()
        texts = torch.split(states_TE, [row.num_tokens for row in plan.rows])
        for row, states_LE in zip(plan.rows, texts, strict=True):
            pooled = [PooledRows(row.request, 1)]
            sums_1E = sum_states(self._vector(row, states_LE).unsqueeze(0), pooled)
            result.add(read_sums(sums_1E, pooled))
        return result

    def profiled(self) -> ProfiledRunner:
        model = self._model
        head = model if isinstance(model, Decoder) else None
        return ProfiledRunner(ops=model.ops, forward=model.hidden, model=head)

    def _vector(self, row: ScheduledRequest, states_LE: Tensor) -> Tensor:
        if row.request.params.pooling == "classify":
            assert isinstance(self._model, Encoder)
            assert self._model.classifier is not None
            return self._model.classifier(states_LE).cpu()
        vector = pool_states(states_LE, self._pooling)
        for dense in self._dense:
            vector = dense(vector)
        return vector

    def _forward(self, batch: StepBatch, rows: list[ScheduledRequest]) -> ForwardContext:
        places_T = batch.ragged.positions_T.long()
        forward = ForwardContext(
            batch.ids_T,
            self._cos_APD[:, places_T],
            self._sin_APD[:, places_T],
            None,
            {},
            layout=batch.ragged,
            task_rows=_task_rows(rows),
        )
        types_T = _token_types(rows) if self._has_types else None
        return forward if types_T is None else replace(forward, types_T=types_T.to(self._device))

    def warm_up(self, row_counts: Sequence[int], most: int) -> None:
        """Run texts of these numbers of rows below `most`, and of `most`: that compiles a GPU's kernels."""
        params = SamplingParams(max_tokens=0, pooling="classify" if self._has_classifier else "embed")
        for count in (*(each for each in row_counts if each < most), most):
            lens = [self._context] * (count // self._context) + [count % self._context]
            texts = [
                Request(request_id=f"trial {n}", prompt_ids=[0] * length, params=params)
                for n, length in enumerate(lens)
                if length
            ]
            for text in texts:
                text.block_table = [0] * -(-text.num_prompt // self._block_size)
            self.execute(StepPlan([ScheduledRequest(text, 0, text.num_prompt, False) for text in texts]))


def _task_rows(rows: list[ScheduledRequest]) -> tuple[TaskRows, ...]:
    """Return the rows of texts that name a task."""
    found: list[TaskRows] = []
    start = 0
    for row in rows:
        task, stop = row.request.params.task, start + row.num_tokens
        found += [] if task is None else [(slice(start, stop), task)]
        start = stop
    return tuple(found)


def _token_types(rows: list[ScheduledRequest]) -> Tensor | None:
    """Return the token type of each row; None if no text is a pair."""
    if all(row.request.params.pair_start is None for row in rows):
        return None
    types = array("q")
    for row in rows:
        start = row.request.params.pair_start
        first = row.num_tokens if start is None else start
        types.extend([0] * first)
        types.extend([1] * (row.num_tokens - first))
    return torch.tensor(types.tolist(), dtype=torch.int64)
