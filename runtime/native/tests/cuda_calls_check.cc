// Compares src/engines/cuda/cuda_api.h with CUDA's cuda.h at compile time: signatures, enum values,
// and a struct's fields.
//
// The build includes this file only if cuda.h is installed. The test passes if this file compiles.
// The program itself does nothing.
#include <cuda.h>

#include <type_traits>

#include "engines/cuda/cuda_api.h"

namespace {

// Maps a type to its form in engines/cuda/cuda_api.h: enums become int, and the structs that
// cuda_api.h declares replace CUDA's structs.
template <class T>
struct Plain {
  using type = std::conditional_t<std::is_enum_v<T>, int, T>;
};
template <>
struct Plain<const CUDA_MEMCPY2D> {
  using type = const dlm::CUDA_MEMCPY2D;
};
template <class T>
struct Plain<T*> {
  using type = typename Plain<T>::type*;
};
template <class R, class... A>
struct Plain<R(A...)> {
  using type = typename Plain<R>::type(typename Plain<A>::type...);
};

#define CHECK_CALL(name, ...)                                                            \
  static_assert(std::is_same_v<decltype(dlm::Cuda::name),                                \
                               Plain<std::remove_reference_t<decltype(::name)>>::type*>, \
                "another signature: " #name);
DLM_CUDA_CALLS(CHECK_CALL)

#define CHECK_NUMBER(name)                                                                  \
  static_assert(dlm::name == static_cast<std::remove_const_t<decltype(dlm::name)>>(::name), \
                "another number: " #name)
CHECK_NUMBER(CUDA_SUCCESS);
CHECK_NUMBER(CUDA_ERROR_NO_DEVICE);
CHECK_NUMBER(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
CHECK_NUMBER(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
CHECK_NUMBER(CU_MEMORYTYPE_DEVICE);
CHECK_NUMBER(CU_STREAM_CAPTURE_MODE_THREAD_LOCAL);
CHECK_NUMBER(CU_STREAM_NON_BLOCKING);

#define CHECK_FIELD(name)                                                                \
  static_assert(offsetof(dlm::CUDA_MEMCPY2D, name) == offsetof(::CUDA_MEMCPY2D, name) && \
                    sizeof(dlm::CUDA_MEMCPY2D::name) == sizeof(::CUDA_MEMCPY2D::name),   \
                "another place: " #name)
CHECK_FIELD(srcXInBytes);
CHECK_FIELD(srcY);
CHECK_FIELD(srcMemoryType);
CHECK_FIELD(srcHost);
CHECK_FIELD(srcDevice);
CHECK_FIELD(srcArray);
CHECK_FIELD(srcPitch);
CHECK_FIELD(dstXInBytes);
CHECK_FIELD(dstY);
CHECK_FIELD(dstMemoryType);
CHECK_FIELD(dstHost);
CHECK_FIELD(dstDevice);
CHECK_FIELD(dstArray);
CHECK_FIELD(dstPitch);
CHECK_FIELD(WidthInBytes);
CHECK_FIELD(Height);
static_assert(sizeof(dlm::CUDA_MEMCPY2D) == sizeof(::CUDA_MEMCPY2D));

}  // namespace

int main() { return 0; }
