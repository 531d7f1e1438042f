set(HOST)
set(LONG prefill.cu)
set(SHORT decode.cu)
set(BINDINGS bind.cpp)
