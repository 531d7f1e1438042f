set(HOST)
set(LONG gemv.cu experts.cu dequantize.cu additive_dequantize.cu)
set(SHORT gemv_launch.cu hadamard.cu)
set(BINDINGS bind.cpp)
