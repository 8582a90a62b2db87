// A libcuda.so.1 that counts GPU memory and has no GPU: what vLLM's sleep allocator calls.
// Memory is physical until its handle is released and every mapping of it is gone, as in CUDA.
#include <stddef.h>
#define MANY 4096

typedef unsigned long long u64;
static u64 next_address = 0x700000000000ULL, next_handle = 1;
static u64 sizes[MANY];
static int references[MANY];
static struct { u64 address, size, handle; } mapped[MANY];
static int mappings;

long physical(void) {
  long total = 0;
  for (u64 handle = 1; handle < next_handle; handle++)
    if (references[handle] > 0) total += sizes[handle];
  return total;
}

// What torch does when a pool is destroyed: it frees one block after another.
void free_all(void (*free_one)(void *, ptrdiff_t, int, void *), u64 *addresses, u64 *bytes, int n) {
  for (int i = 0; i < n; i++) free_one((void *)addresses[i], bytes[i], 0, NULL);
}

int cuMemGetAllocationGranularity(size_t *bytes, const void *properties, int option) {
  *bytes = 2 << 20;
  return 0;
}
int cuMemAddressReserve(u64 *address, size_t size, size_t alignment, u64 hint, u64 flags) {
  *address = next_address;
  next_address += size;
  return 0;
}
int cuMemAddressFree(u64 address, size_t size) { return 0; }
int cuMemCreate(u64 *handle, size_t size, const void *properties, u64 flags) {
  *handle = next_handle++;
  sizes[*handle] = size;
  references[*handle] = 1;
  return 0;
}
int cuMemMap(u64 address, size_t size, size_t offset, u64 handle, u64 flags) {
  for (int i = 0; i < mappings; i++)
    if (mapped[i].address == address) return 1;
  mapped[mappings].address = address;
  mapped[mappings].size = size;
  mapped[mappings++].handle = handle;
  references[handle]++;
  return 0;
}
int cuMemSetAccess(u64 address, size_t size, const void *access, size_t count) { return 0; }
int cuMemUnmap(u64 address, size_t size) {
  for (int i = 0; i < mappings; i++)
    if (mapped[i].address == address && mapped[i].size == size) {
      references[mapped[i].handle]--;
      mapped[i] = mapped[--mappings];
      return 0;
    }
  return 1;
}
int cuMemRelease(u64 handle) {
  references[handle]--;
  return 0;
}

int cuCtxGetCurrent(void **context) {
  *context = (void *)1;
  return 0;
}
int cuCtxSetCurrent(void *context) { return 0; }
int cuDevicePrimaryCtxRetain(void **context, int device) { return 100; }
int cuDeviceGetAttribute(int *value, int attribute, int device) { return 100; }
int cuGetErrorString(int error, const char **text) {
  *text = "an error of the fake driver";
  return 0;
}
int cuGetProcAddress_v2(void) { return 100; }
int cuPointerGetAttribute(void) { return 100; }
int cuTensorMapEncodeTiled(void) { return 100; }
