set(HOST)
set(LONG decode.cu)
set(SHORT kv_cache.cu)
set(BINDINGS bind.cpp)
