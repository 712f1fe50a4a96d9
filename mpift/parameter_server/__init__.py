"""The parameter server: versioned arrays, sharded over the ranks, each with a backup."""

from mpift.parameter_server.client import Pushed, Versioned
from mpift.parameter_server.optimizers import SGD, Adagrad, ServerOptimizer
from mpift.parameter_server.server import ParameterServer

__all__ = ["SGD", "Adagrad", "ParameterServer", "Pushed", "ServerOptimizer", "Versioned"]
