set(HOST)
set(LONG)
set(SHORT sample.cu rmsnorm.cu embed.cu logit_adjust.cu)
set(BINDINGS bind.cpp)
