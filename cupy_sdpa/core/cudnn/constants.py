"""The enums of cuDNN's graph API, with the constants that this package uses.

Generated from NVIDIA's cudnn_graph.h by ``python tools/constants.py``; do not edit.
A constant's C name is its enum's prefix followed by its name here.
"""

from enum import IntEnum

#: The cuDNN version whose header this table was made from.
HEADER_VERSION = 92800


class CudnnConstant(IntEnum):
    """A constant of the C API."""


def name_of(enum: type[CudnnConstant], value: int) -> str | None:
    """The name of a value, or None where it is newer than this table."""
    return enum._value2member_map_[value].name if value in enum._value2member_map_ else None


class Status(CudnnConstant):
    """``cudnnStatus_t``: constants begin with ``CUDNN_STATUS_``."""

    INTERNAL_ERROR_HOST_ALLOCATION_FAILED = 4003
    INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED = 4004


class DataType(CudnnConstant):
    """``cudnnDataType_t``: constants begin with ``CUDNN_DATA_``."""

    FLOAT = 0
    DOUBLE = 1
    HALF = 2
    INT8 = 3
    INT32 = 4
    UINT8 = 6
    BFLOAT16 = 9
    INT64 = 10
    BOOLEAN = 11
    FP8_E4M3 = 12
    FP8_E5M2 = 13


class ReduceTensorOp(CudnnConstant):
    """``cudnnReduceTensorOp_t``: constants begin with ``CUDNN_REDUCE_TENSOR_``."""

    ADD = 0
    MUL = 1
    MIN = 2
    MAX = 3
    AMAX = 4


class PointwiseMode(CudnnConstant):
    """``cudnnPointwiseMode_t``: constants begin with ``CUDNN_POINTWISE_``."""

    ADD = 0
    DIV = 6
    MAX = 3
    MIN = 2
    MOD = 7
    MUL = 1
    POW = 8
    SUB = 9
    ABS = 10
    CEIL = 11
    COS = 12
    EXP = 13
    FLOOR = 14
    LOG = 15
    NEG = 16
    RSQRT = 17
    SIN = 18
    SQRT = 4
    TAN = 19
    ERF = 20
    IDENTITY = 21
    RECIPROCAL = 22
    TANH_FWD = 101
    CMP_EQ = 300
    CMP_NEQ = 301
    CMP_GT = 302
    CMP_GE = 303
    CMP_LT = 304
    CMP_LE = 305
    LOGICAL_AND = 400
    LOGICAL_OR = 401
    GEN_INDEX = 501
    BINARY_SELECT = 601


class RngDistribution(CudnnConstant):
    """``cudnnRngDistribution_t``: constants begin with ``CUDNN_RNG_DISTRIBUTION_``."""

    BERNOULLI = 0


class AttributeName(CudnnConstant):
    """``cudnnBackendAttributeName_t``: constants begin with ``CUDNN_ATTR_``."""

    POINTWISE_MODE = 0
    POINTWISE_MATH_PREC = 1
    POINTWISE_AXIS = 9
    ENGINEHEUR_MODE = 200
    ENGINEHEUR_OPERATION_GRAPH = 201
    ENGINEHEUR_RESULTS = 202
    ENGINEHEUR_DEVICEPROP = 204
    ENGINECFG_ENGINE = 300
    ENGINECFG_KNOB_CHOICES = 302
    ENGINECFG_WORKSPACE_SIZE = 303
    EXECUTION_PLAN_HANDLE = 400
    EXECUTION_PLAN_ENGINE_CONFIG = 401
    EXECUTION_PLAN_WORKSPACE_SIZE = 402
    EXECUTION_PLAN_JSON_REPRESENTATION = 405
    EXECUTION_PLAN_DEVICEPROP = 407
    EXECUTION_PLAN_CUDA_GRAPH_RETENTION = 408
    KNOB_CHOICE_KNOB_TYPE = 600
    KNOB_CHOICE_KNOB_VALUE = 601
    OPERATION_POINTWISE_PW_DESCRIPTOR = 750
    OPERATION_POINTWISE_XDESC = 751
    OPERATION_POINTWISE_BDESC = 752
    OPERATION_POINTWISE_YDESC = 753
    OPERATION_POINTWISE_TDESC = 758
    OPERATIONGRAPH_HANDLE = 800
    OPERATIONGRAPH_OPS = 801
    OPERATIONGRAPH_MODE = 806
    TENSOR_BYTE_ALIGNMENT = 900
    TENSOR_DATA_TYPE = 901
    TENSOR_DIMENSIONS = 902
    TENSOR_STRIDES = 903
    TENSOR_UNIQUE_ID = 906
    TENSOR_IS_VIRTUAL = 907
    TENSOR_IS_BY_VALUE = 908
    TENSOR_RAGGED_OFFSET_DESC = 913
    VARIANT_PACK_UNIQUE_IDS = 1000
    VARIANT_PACK_DATA_POINTERS = 1001
    VARIANT_PACK_WORKSPACE = 1003
    ENGINE_OPERATION_GRAPH = 1300
    ENGINE_GLOBAL_INDEX = 1301
    ENGINE_NUMERICAL_NOTE = 1303
    ENGINE_DEVICEPROP = 1307
    MATMUL_COMP_TYPE = 1500
    MATMUL_PADDING_VALUE = 1503
    OPERATION_MATMUL_ADESC = 1520
    OPERATION_MATMUL_BDESC = 1521
    OPERATION_MATMUL_CDESC = 1522
    OPERATION_MATMUL_DESC = 1523
    OPERATION_MATMUL_GEMM_M_OVERRIDE_DESC = 1525
    OPERATION_MATMUL_GEMM_N_OVERRIDE_DESC = 1526
    OPERATION_MATMUL_GEMM_K_OVERRIDE_DESC = 1527
    REDUCTION_OPERATOR = 1600
    REDUCTION_COMP_TYPE = 1601
    OPERATION_REDUCTION_XDESC = 1610
    OPERATION_REDUCTION_YDESC = 1611
    OPERATION_REDUCTION_DESC = 1612
    OPERATION_PAGED_CACHE_LOAD_CONTAINER_DESC = 1950
    OPERATION_PAGED_CACHE_LOAD_YDESC = 1951
    OPERATION_PAGED_CACHE_LOAD_SEQUENCE_DESC = 1952
    OPERATION_PAGED_CACHE_LOAD_PAGE_TABLE_DESC = 1953
    OPERATION_RESHAPE_XDESC = 2200
    OPERATION_RESHAPE_YDESC = 2201
    OPERATION_RESHAPE_MODE = 2202
    RNG_DISTRIBUTION = 2300
    RNG_BERNOULLI_DIST_PROBABILITY = 2305
    OPERATION_RNG_YDESC = 2310
    OPERATION_RNG_SEED = 2311
    OPERATION_RNG_DESC = 2312
    OPERATION_RNG_OFFSET_DESC = 2313
    DEVICEPROP_HANDLE = 2701
    DEVICEPROP_JSON_REPRESENTATION = 2702


class AttributeType(CudnnConstant):
    """``cudnnBackendAttributeType_t``: constants begin with ``CUDNN_TYPE_``."""

    HANDLE = 0
    DATA_TYPE = 1
    BOOLEAN = 2
    INT64 = 3
    FLOAT = 4
    DOUBLE = 5
    VOID_PTR = 6
    HEUR_MODE = 8
    KNOB_TYPE = 9
    NUMERICAL_NOTE = 11
    POINTWISE_MODE = 14
    BACKEND_DESCRIPTOR = 15
    REDUCTION_OPERATOR_TYPE = 18
    INT32 = 23
    CHAR = 24
    RNG_DISTRIBUTION = 29
    CUDA_GRAPH_RETENTION = 33


class DescriptorType(CudnnConstant):
    """``cudnnBackendDescriptorType_t``: constants begin with ``CUDNN_BACKEND_``."""

    POINTWISE_DESCRIPTOR = 0
    ENGINE_DESCRIPTOR = 2
    ENGINECFG_DESCRIPTOR = 3
    ENGINEHEUR_DESCRIPTOR = 4
    EXECUTION_PLAN_DESCRIPTOR = 5
    KNOB_CHOICE_DESCRIPTOR = 7
    OPERATION_POINTWISE_DESCRIPTOR = 13
    OPERATIONGRAPH_DESCRIPTOR = 15
    VARIANT_PACK_DESCRIPTOR = 16
    TENSOR_DESCRIPTOR = 17
    MATMUL_DESCRIPTOR = 18
    OPERATION_MATMUL_DESCRIPTOR = 19
    REDUCTION_DESCRIPTOR = 21
    OPERATION_REDUCTION_DESCRIPTOR = 22
    OPERATION_RESHAPE_DESCRIPTOR = 31
    RNG_DESCRIPTOR = 32
    OPERATION_RNG_DESCRIPTOR = 33
    OPERATION_PAGED_CACHE_LOAD_DESCRIPTOR = 35
    DEVICEPROP_DESCRIPTOR = 38


class NumericalNote(CudnnConstant):
    """``cudnnBackendNumericalNote_t``: constants begin with ``CUDNN_NUMERICAL_NOTE_``."""

    TENSOR_CORE = 0
    DOWN_CONVERT_INPUTS = 1
    REDUCED_PRECISION_REDUCTION = 2
    FFT = 3
    NONDETERMINISTIC = 4
    WINOGRAD = 5
    WINOGRAD_TILE_4x4 = 6
    WINOGRAD_TILE_6x6 = 7
    WINOGRAD_TILE_13x13 = 8
    STRICT_NAN_PROP = 9


class KnobType(CudnnConstant):
    """``cudnnBackendKnobType_t``: constants begin with ``CUDNN_KNOB_TYPE_``."""

    MULTIPLY = 11
    STAGES = 14
    KERNEL_CFG = 24
    WORKSPACE = 25
    STREAM_K = 38
    TILE_M = 40
    TILE_N = 41


class HeurMode(CudnnConstant):
    """``cudnnBackendHeurMode_t``: constants begin with ``CUDNN_HEUR_MODE_``."""

    B = 1
    FALLBACK = 2
    A = 3


class CudaGraphRetention(CudnnConstant):
    """``cudnnCudaGraphRetention_t``: constants begin with ``CUDNN_CUDA_GRAPH_RETENTION_``."""

    NONE = 1
