"""Horovod's callbacks for Keras."""

from dadt.frontends.keras.callbacks import BroadcastGlobalVariablesCallback as BroadcastGlobalVariablesCallback
from dadt.frontends.keras.callbacks import LearningRateScheduleCallback as LearningRateScheduleCallback
from dadt.frontends.keras.callbacks import LearningRateWarmupCallback as LearningRateWarmupCallback
from dadt.frontends.keras.callbacks import MetricAverageCallback as MetricAverageCallback
