"""DALI operators for the steps of a Plan, with one module per module of ``transforms/``."""

from . import augment as augment
from . import auto_augment as auto_augment
from . import color as color
from . import container as container
from . import geometry as geometry
from . import multi_crop as multi_crop
from . import resize as resize
from . import type_conversion as type_conversion
from . import warp as warp
from .graph import OPERATORS as OPERATORS
from .graph import Graph as Graph
from .graph import PipelineOptions as PipelineOptions
