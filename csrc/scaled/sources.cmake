set(HOST)
set(LONG gemv.cu)
set(SHORT dequantize.cu)
set(BINDINGS bind.cpp)
