"""A Plan in, DALI operators out: one file for each of ``transforms/``, and how each step is said in DALI."""

from . import auto as auto
from . import choice as choice
from . import color as color
from . import convert as convert
from . import corrupt as corrupt
from . import geometry as geometry
from . import resize as resize
from . import views as views
from . import warp as warp
from .graph import OPERATORS as OPERATORS
from .graph import Graph as Graph
from .graph import PipelineOptions as PipelineOptions
