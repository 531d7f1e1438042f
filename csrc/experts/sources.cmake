set(HOST)
set(LONG gemv.cu mxfp4_gemv.cu)
set(SHORT router.cu mxfp4_dequantize.cu)
set(BINDINGS bind.cpp)
