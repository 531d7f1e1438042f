set(HOST)
set(LONG vptq_gemv.cu vptq_dequantize.cu)
set(SHORT aqlm_gemv.cu roofline.cu)
set(BINDINGS bind.cpp)
