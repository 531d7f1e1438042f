set(HOST)
set(LONG gemv.cu)
set(SHORT dequantize.cu gemv_launch.cu)
set(BINDINGS bind.cpp)
