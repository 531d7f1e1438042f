set(HOST)
set(LONG prefill.cu)
set(SHORT decode.cu verify.cu)
set(BINDINGS bind.cpp)
