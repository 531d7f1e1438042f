set(HOST)
set(LONG gemv.cu gemm.cu gemv_rows.cu)
set(SHORT dequantize.cu gemv_launch.cu)
set(BINDINGS bind.cpp)
