// Compares src/ort_api.h with ONNX Runtime's official header, at compile time: slots, signatures and the numbers of enums.
//
// Built only where the header is installed (Debian's libonnxruntime-dev puts it into <onnxruntime/>). That it compiles is
// the test; the program does nothing.
#include "graph.h"
#include "ort_api.h"

#if __has_include(<onnxruntime/onnxruntime_c_api.h>)
#include <onnxruntime/onnxruntime_c_api.h>
#else
#include <onnxruntime_c_api.h>
#endif

#include <type_traits>

// The official pointers carry attributes (nonnull, warn_unused_result) that do not belong to a type.
#pragma GCC diagnostic ignored "-Wignored-attributes"

namespace {

// A type as ort_api.h writes it: enums are int, and noexcept is left out.
template <class T>
struct Plain {
  using type = std::conditional_t<std::is_enum_v<T>, int, T>;
};
template <class T>
struct Plain<T*> {
  using type = typename Plain<T>::type*;
};
template <class R, class... A>
struct Plain<R(A...)> {
  using type = typename Plain<R>::type(typename Plain<A>::type...);
};
template <class R, class... A>
struct Plain<R(A...) noexcept> {
  using type = typename Plain<R>::type(typename Plain<A>::type...);
};

template <class Ours, class Theirs>
constexpr bool same_function = std::is_same_v<typename Ours::Pointer, typename Plain<Theirs>::type>;

static_assert(ORT_API_VERSION >= dlm::ort::kApiVersion, "the header is older than the table that we ask for");

#define CHECK_SLOT(name)                                                                                        \
  static_assert(offsetof(OrtApi, name) == dlm::ort::name::slot * sizeof(void*), "another slot: " #name);        \
  static_assert(same_function<dlm::ort::name, decltype(OrtApi::name)>, "another signature: " #name)

CHECK_SLOT(GetErrorCode);
CHECK_SLOT(GetErrorMessage);
CHECK_SLOT(CreateEnv);
CHECK_SLOT(CreateSession);
CHECK_SLOT(Run);
CHECK_SLOT(CreateSessionOptions);
CHECK_SLOT(SetSessionExecutionMode);
CHECK_SLOT(DisableMemPattern);
CHECK_SLOT(SetSessionLogSeverityLevel);
CHECK_SLOT(SetSessionGraphOptimizationLevel);
CHECK_SLOT(SetIntraOpNumThreads);
CHECK_SLOT(SetInterOpNumThreads);
CHECK_SLOT(SessionGetInputCount);
CHECK_SLOT(SessionGetOutputCount);
CHECK_SLOT(SessionGetInputTypeInfo);
CHECK_SLOT(SessionGetOutputTypeInfo);
CHECK_SLOT(SessionGetInputName);
CHECK_SLOT(SessionGetOutputName);
CHECK_SLOT(CreateTensorWithDataAsOrtValue);
CHECK_SLOT(CastTypeInfoToTensorInfo);
CHECK_SLOT(GetTensorElementType);
CHECK_SLOT(GetDimensionsCount);
CHECK_SLOT(GetDimensions);
CHECK_SLOT(CreateCpuMemoryInfo);
CHECK_SLOT(AllocatorFree);
CHECK_SLOT(GetAllocatorWithDefaultOptions);
CHECK_SLOT(ReleaseEnv);
CHECK_SLOT(ReleaseStatus);
CHECK_SLOT(ReleaseMemoryInfo);
CHECK_SLOT(ReleaseSession);
CHECK_SLOT(ReleaseValue);
CHECK_SLOT(ReleaseTypeInfo);
CHECK_SLOT(ReleaseSessionOptions);
CHECK_SLOT(AddSessionConfigEntry);

static_assert(offsetof(OrtApiBase, GetApi) == offsetof(dlm::ort::ApiBase, get_api));
static_assert(offsetof(OrtApiBase, GetVersionString) == offsetof(dlm::ort::ApiBase, get_version_string));

static_assert(sizeof(ONNXTensorElementDataType) == sizeof(int) && sizeof(OrtErrorCode) == sizeof(int));
static_assert(ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT == static_cast<ONNXTensorElementDataType>(dlm::kFloat));
static_assert(ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32 == static_cast<ONNXTensorElementDataType>(dlm::kInt32));
static_assert(ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64 == static_cast<ONNXTensorElementDataType>(dlm::kInt64));
static_assert(ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16 == static_cast<ONNXTensorElementDataType>(dlm::kFloat16));
static_assert(ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16 == static_cast<ONNXTensorElementDataType>(dlm::kBFloat16));
static_assert(ORT_NO_SUCHFILE == static_cast<OrtErrorCode>(dlm::ort::kNoSuchFile));
static_assert(ORT_NO_MODEL == static_cast<OrtErrorCode>(dlm::ort::kNoModel));
static_assert(ORT_INVALID_PROTOBUF == static_cast<OrtErrorCode>(dlm::ort::kInvalidProtobuf));
static_assert(ORT_NOT_IMPLEMENTED == static_cast<OrtErrorCode>(dlm::ort::kNotImplemented));
static_assert(ORT_INVALID_GRAPH == static_cast<OrtErrorCode>(dlm::ort::kInvalidGraph));
static_assert(ORT_LOGGING_LEVEL_FATAL == dlm::ort::kLogFatal && ORT_SEQUENTIAL == dlm::ort::kSequential);
static_assert(ORT_ENABLE_ALL == dlm::ort::kOptimizeAll && OrtDeviceAllocator == dlm::ort::kDeviceAllocator);
static_assert(OrtMemTypeDefault == dlm::ort::kMemTypeDefault);

}  // namespace

int main() { return 0; }
