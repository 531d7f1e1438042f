set(HOST)
set(LONG)
set(SHORT decode.cu)
set(BINDINGS bind.cpp)
