set(HOST)
set(LONG gemv.cu mxfp4_gemv.cu gemm.cu)
set(SHORT router.cu mxfp4_dequantize.cu entries.cu)
set(BINDINGS bind.cpp)
