"""`PackingMetrics`: what a run's packs are like, in Bridge's TensorBoard and Weights & Biases loggers.

cfg.dataset.metrics.directory = "run/metrics"
pretrain(cfg, forward_step, callbacks=[PackingMetrics()])
"""

from typing import Any

from megatron.bridge.training.callbacks import Callback, CallbackContext

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
            self._log = None if config.directory is None else MetricsLog(config)

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
