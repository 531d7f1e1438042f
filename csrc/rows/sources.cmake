set(HOST)
set(LONG)
set(SHORT int8_gemv.cu dense_gemv.cu)
set(BINDINGS bind.cpp)
