"""Optimizers: pure pairs of (init, update) over pytrees, the parts they are chained from, and schedules."""

from .adam import adamw as adamw
from .adam import scale_by_adam as scale_by_adam
from .average import averaged as averaged
from .average import ema as ema
from .lion import lion as lion
from .momentum import sgd as sgd
from .momentum import trace as trace
from .muon import muon as muon
from .norm import clip_by_global_norm as clip_by_global_norm
from .norm import global_norm as global_norm
from .patterns import freeze as freeze
from .patterns import masked as masked
from .patterns import multi_transform as multi_transform
from .scaling import add_decayed_weights as add_decayed_weights
from .scaling import scale as scale
from .scaling import scale_by_schedule as scale_by_schedule
from .schedules import Schedule as Schedule
from .schedules import constant as constant
from .schedules import cosine as cosine
from .schedules import linear as linear
from .schedules import warmup_cosine as warmup_cosine
from .schedules import warmup_linear as warmup_linear
from .schedules import wsd as wsd
from .transform import Transform as Transform
from .transform import apply_updates as apply_updates
from .transform import chain as chain
