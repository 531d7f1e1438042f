set(HOST)
set(LONG gemv_256.cu gemv_32.cu experts_256.cu experts_32.cu)
set(SHORT gemv_grid.cu experts_grid.cu gemv_ternary.cu experts_ternary.cu gemv_nvfp4.cu experts_nvfp4.cu gemv.cu experts.cu dequantize.cu)
set(BINDINGS bind.cpp)
