set(HOST)
set(LONG gemv_256.cu gemv_32.cu)
set(SHORT gemv.cu dequantize.cu)
set(BINDINGS bind.cpp)
