"""`PackingMetrics`: what a run's packs are like, in Bridge's TensorBoard and Weights & Biases loggers.

cfg.dataset.metrics.directory = "run/metrics"
pretrain(cfg, forward_step, callbacks=[PackingMetrics()])
"""

import functools
from collections.abc import Mapping
from typing import Any

from megatron.bridge.training.callbacks import Callback, CallbackContext
from megatron.bridge.utils.common_utils import get_world_size_safe

from energon_packing.bridge.provider import PackProvider, frozen
from energon_packing.config.run import MetricsConfig
from energon_packing.energon.metrics import MetricsLog


class PackingMetrics(Callback):
    """Posts the metrics of all ranks (``dataset.metrics``) on the rank that has Bridge's loggers; with any forward
    step. Does nothing on other ranks, without ``dataset.metrics.directory``, and with other data sets."""

    _log: MetricsLog | None = None

    def on_train_start(self, context: CallbackContext) -> None:
        """Begins to follow the run's lines."""
        dataset = context.state.cfg.dataset
        self._log = None
        if isinstance(dataset, PackProvider) and any(logger is not None for logger in _loggers(context)):
            config = frozen(MetricsConfig, dataset.metrics, where="dataset.metrics")
            more = functools.partial(throughput, context.state.cfg)
            self._log = None if config.directory is None else MetricsLog(config, more)

    def on_train_step_end(self, context: CallbackContext) -> None:
        """Posts what is new, under the number that Bridge gives this step."""
        if self._log is not None:
            self._log.post(context.state.train_state.step + 1, *_loggers(context))

    def on_train_end(self, context: CallbackContext) -> None:
        """Posts the rest."""
        if self._log is None:
            return
        tensorboard, wandb = _loggers(context)
        self._log.finish(context.state.train_state.step, tensorboard, wandb)
        if tensorboard is not None:
            tensorboard.flush()


def _loggers(context: CallbackContext) -> tuple[Any, Any]:
    return context.state.tensorboard_logger, context.state.wandb_logger


def throughput(config: Any, rates: Mapping[str, float]) -> dict[str, float]:
    """``tflops_per_device`` of a Bridge configuration whose ranks together train on `rates` per second, by Bridge's
    formulas: for segments without padding and for each image or frame, in place of whole rows and all images of a row
    as one. Nothing for models that bring a formula of their own."""
    # Here and not above: it imports Transformer Engine, which a run's trainer has done by now.
    from megatron.bridge.training.utils.flop_utils import num_floating_point_operations, vit_flops

    if not rates or any(name.startswith("_get_num_floating_point_operations") for name in dir(config.model)):
        return {}
    flops = float(num_floating_point_operations(config, rates["segments"], rates["tokens"], rates["squares"]))
    if patches := rates.get("patches", 0):
        # It grows as a * n + b * n^2 with the patches n of an image, if these are whole merged tokens.
        unit = getattr(getattr(config.model, "vision_config", None), "spatial_merge_size", 2) ** 2
        one, two = (vit_flops(config, 1, times * unit) for times in (1, 2))
        square = (two - 2 * one) / 2
        flops += (one - square) * patches / unit + square * rates["patch_squares"] / unit**2
    return {"tflops_per_device": flops / 1e12 / get_world_size_safe()}
