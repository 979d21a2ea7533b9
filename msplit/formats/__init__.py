"""Reads and writes GraphDef, MetaGraphDef and SavedModel."""

from msplit.formats.atomic import write_bytes_atomic as write_bytes_atomic
from msplit.formats.bundle import differs as differs
from msplit.formats.bundle import saved_as as saved_as
from msplit.formats.bundle import stamp as stamp
from msplit.formats.bundle import tables as tables
from msplit.formats.bundle import unused_keys as unused_keys
from msplit.formats.bundle import variables as variables
from msplit.formats.guess import left_out_text as left_out_text
from msplit.formats.model import STREAM_ID as STREAM_ID
from msplit.formats.model import Endpoint as Endpoint
from msplit.formats.model import Format as Format
from msplit.formats.model import Model as Model
from msplit.formats.reader import read as read
from msplit.formats.reader import sniff as sniff
from msplit.formats.reader import to_train as to_train
from msplit.formats.summary import Contents as Contents
from msplit.formats.summary import contents as contents
from msplit.formats.summary import graph_hash as graph_hash
from msplit.formats.summary import structure_hash as structure_hash
from msplit.formats.writer import WriteReport as WriteReport
from msplit.formats.writer import write as write
