// Compares src/engines/onnxruntime/ort_api.h with ONNX Runtime's official header at compile time:
// slots, signatures and enum values.
//
// The build includes this file only if the header is installed (Debian's libonnxruntime-dev puts it
// in <onnxruntime/>). The test passes if this file compiles. The program itself does nothing.
#include "engines/graph_check.h"
#include "engines/onnxruntime/ort_api.h"

#if __has_include(<onnxruntime/onnxruntime_c_api.h>)
#include <onnxruntime/onnxruntime_c_api.h>
#else
#include <onnxruntime_c_api.h>
#endif

#include <type_traits>

// The official pointers have attributes (nonnull, warn_unused_result) that are not part of a type.
#pragma GCC diagnostic ignored "-Wignored-attributes"

namespace {

// Maps a type to its form in engines/onnxruntime/ort_api.h: enums become int, noexcept is removed,
// and the tables in which our code looks up functions become void.
template <class T>
struct Plain {
  using type = std::conditional_t<std::is_enum_v<T>, int, T>;
};
template <>
struct Plain<const OrtApi> {
  using type = const void;
};
template <>
struct Plain<const OrtCustomOp> {
  using type = const dlm::ort::CustomOp;
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

static_assert(ORT_API_VERSION >= dlm::ort::kApiVersion,
              "the header is older than the table that we ask for");

#define CHECK_SLOT_OF(ours, theirs)                                               \
  static_assert(offsetof(OrtApi, theirs) == dlm::ort::ours::slot * sizeof(void*), \
                "another slot: " #theirs);                                        \
  static_assert(same_function<dlm::ort::ours, decltype(OrtApi::theirs)>,          \
                "another signature: " #theirs)
#define CHECK_SLOT(name) CHECK_SLOT_OF(name, name)

CHECK_SLOT(CreateStatus);
CHECK_SLOT(GetErrorCode);
CHECK_SLOT(GetErrorMessage);
CHECK_SLOT(CreateEnv);
CHECK_SLOT(CreateSession);
CHECK_SLOT(Run);
CHECK_SLOT(CreateSessionOptions);
CHECK_SLOT(SetSessionExecutionMode);
CHECK_SLOT(DisableMemPattern);
CHECK_SLOT(SetSessionLogSeverityLevel);
CHECK_SLOT(SetUserLoggingFunction);
CHECK_SLOT(SetSessionGraphOptimizationLevel);
CHECK_SLOT(SetIntraOpNumThreads);
CHECK_SLOT(SetInterOpNumThreads);
CHECK_SLOT(CreateCustomOpDomain);
CHECK_SLOT_OF(CustomOpDomainAdd, CustomOpDomain_Add);
CHECK_SLOT(AddCustomOpDomain);
CHECK_SLOT(SessionGetInputCount);
CHECK_SLOT(SessionGetOutputCount);
CHECK_SLOT_OF(SessionGetOptionalInputCount, SessionGetOverridableInitializerCount);
CHECK_SLOT(SessionGetInputTypeInfo);
CHECK_SLOT(SessionGetOutputTypeInfo);
CHECK_SLOT_OF(SessionGetOptionalInputTypeInfo, SessionGetOverridableInitializerTypeInfo);
CHECK_SLOT(SessionGetInputName);
CHECK_SLOT(SessionGetOutputName);
CHECK_SLOT_OF(SessionGetOptionalInputName, SessionGetOverridableInitializerName);
CHECK_SLOT(CreateRunOptions);
CHECK_SLOT(AddRunConfigEntry);
CHECK_SLOT(ReleaseRunOptions);
CHECK_SLOT(CreateTensorWithDataAsOrtValue);
CHECK_SLOT(GetTensorMutableData);
CHECK_SLOT(CastTypeInfoToTensorInfo);
CHECK_SLOT(GetTensorElementType);
CHECK_SLOT(GetDimensionsCount);
CHECK_SLOT(GetDimensions);
CHECK_SLOT(GetTensorTypeAndShape);
CHECK_SLOT(CreateMemoryInfo);
CHECK_SLOT(CreateCpuMemoryInfo);
CHECK_SLOT(AllocatorAlloc);
CHECK_SLOT(AllocatorFree);
CHECK_SLOT(GetAllocatorWithDefaultOptions);
CHECK_SLOT_OF(KernelInfoGetAttributeFloat, KernelInfoGetAttribute_float);
CHECK_SLOT_OF(KernelInfoGetAttributeInt64, KernelInfoGetAttribute_int64);
CHECK_SLOT_OF(KernelContextGetInputCount, KernelContext_GetInputCount);
CHECK_SLOT_OF(KernelContextGetInput, KernelContext_GetInput);
CHECK_SLOT_OF(KernelContextGetOutput, KernelContext_GetOutput);
CHECK_SLOT(ReleaseEnv);
CHECK_SLOT(ReleaseStatus);
CHECK_SLOT(ReleaseMemoryInfo);
CHECK_SLOT(ReleaseSession);
CHECK_SLOT(ReleaseValue);
CHECK_SLOT(ReleaseTypeInfo);
CHECK_SLOT(ReleaseTensorTypeAndShapeInfo);
CHECK_SLOT(ReleaseSessionOptions);
CHECK_SLOT(ReleaseCustomOpDomain);
CHECK_SLOT(GetAvailableProviders);
CHECK_SLOT(ReleaseAvailableProviders);
CHECK_SLOT(AddSessionConfigEntry);
CHECK_SLOT(ReleaseAllocator);
CHECK_SLOT_OF(KernelInfoGetAttributeArrayInt64, KernelInfoGetAttributeArray_int64);
CHECK_SLOT_OF(AppendTensorRtProvider, SessionOptionsAppendExecutionProvider_TensorRT_V2);
CHECK_SLOT_OF(CreateTensorRtProviderOptions, CreateTensorRTProviderOptions);
CHECK_SLOT_OF(UpdateTensorRtProviderOptions, UpdateTensorRTProviderOptions);
CHECK_SLOT_OF(ReleaseTensorRtProviderOptions, ReleaseTensorRTProviderOptions);
CHECK_SLOT_OF(AppendCudaProvider, SessionOptionsAppendExecutionProvider_CUDA_V2);
CHECK_SLOT_OF(CreateCudaProviderOptions, CreateCUDAProviderOptions);
CHECK_SLOT_OF(UpdateCudaProviderOptions, UpdateCUDAProviderOptions);
CHECK_SLOT_OF(ReleaseCudaProviderOptions, ReleaseCUDAProviderOptions);
CHECK_SLOT_OF(KernelContextGetAllocator, KernelContext_GetAllocator);
CHECK_SLOT_OF(KernelContextParallelFor, KernelContext_ParallelFor);
#if ORT_API_VERSION >= 22
CHECK_SLOT(GetKeyValue);
CHECK_SLOT_OF(RegisterProviderLibrary, RegisterExecutionProviderLibrary);
CHECK_SLOT_OF(UnregisterProviderLibrary, UnregisterExecutionProviderLibrary);
CHECK_SLOT_OF(GetProviderDevices, GetEpDevices);
CHECK_SLOT_OF(AppendProviderDevices, SessionOptionsAppendExecutionProvider_V2);
CHECK_SLOT_OF(HardwareGetMetadata, HardwareDevice_Metadata);
CHECK_SLOT_OF(ProviderDeviceGetProvider, EpDevice_EpName);
CHECK_SLOT_OF(ProviderDeviceGetMetadata, EpDevice_EpMetadata);
CHECK_SLOT_OF(ProviderDeviceGetHardware, EpDevice_Device);
#endif
#if ORT_API_VERSION >= 24
static_assert(dlm::ort::kPlacementVersion == 24);
CHECK_SLOT_OF(GetPlacement, Session_GetEpGraphAssignmentInfo);
CHECK_SLOT_OF(PlacementGetProvider, EpAssignedSubgraph_GetEpName);
CHECK_SLOT_OF(PlacementGetNodes, EpAssignedSubgraph_GetNodes);
CHECK_SLOT_OF(PlacedNodeGetName, EpAssignedNode_GetName);
CHECK_SLOT_OF(PlacedNodeGetDomain, EpAssignedNode_GetDomain);
CHECK_SLOT_OF(PlacedNodeGetOperator, EpAssignedNode_GetOperatorType);
#endif

// New versions of ONNX Runtime add members only at the end of OrtCustomOp. ONNX Runtime reads only
// the members that exist in the struct's `version`.
static_assert(sizeof(dlm::ort::CustomOp) <= sizeof(OrtCustomOp));
static_assert(
    std::is_same_v<decltype(dlm::ort::CustomOp::version), decltype(OrtCustomOp::version)>);
static_assert(offsetof(dlm::ort::CustomOp, version) == offsetof(OrtCustomOp, version));

#define CHECK_FIELD(ours, theirs)                                                    \
  static_assert(offsetof(dlm::ort::CustomOp, ours) == offsetof(OrtCustomOp, theirs), \
                "another place: " #theirs);                                          \
  static_assert(std::is_same_v<decltype(dlm::ort::CustomOp::ours),                   \
                               Plain<decltype(OrtCustomOp::theirs)>::type>,          \
                "another signature: " #theirs)

CHECK_FIELD(create_kernel, CreateKernel);
CHECK_FIELD(get_name, GetName);
CHECK_FIELD(get_provider, GetExecutionProviderType);
CHECK_FIELD(get_input_type, GetInputType);
CHECK_FIELD(get_input_count, GetInputTypeCount);
CHECK_FIELD(get_output_type, GetOutputType);
CHECK_FIELD(get_output_count, GetOutputTypeCount);
CHECK_FIELD(compute, KernelCompute);
CHECK_FIELD(destroy_kernel, KernelDestroy);
CHECK_FIELD(get_input_kind, GetInputCharacteristic);
CHECK_FIELD(get_output_kind, GetOutputCharacteristic);
CHECK_FIELD(get_input_memory, GetInputMemoryType);
CHECK_FIELD(get_variadic_input_minimum, GetVariadicInputMinArity);
CHECK_FIELD(get_variadic_input_homogeneity, GetVariadicInputHomogeneity);
CHECK_FIELD(get_variadic_output_minimum, GetVariadicOutputMinArity);
CHECK_FIELD(get_variadic_output_homogeneity, GetVariadicOutputHomogeneity);
CHECK_FIELD(create_kernel_v2, CreateKernelV2);
CHECK_FIELD(compute_v2, KernelComputeV2);
CHECK_FIELD(infer_shape, InferOutputShapeFn);
CHECK_FIELD(get_start_version, GetStartVersion);
CHECK_FIELD(get_end_version, GetEndVersion);
CHECK_FIELD(get_may_inplace, GetMayInplace);
CHECK_FIELD(release_may_inplace, ReleaseMayInplace);
CHECK_FIELD(get_alias_map, GetAliasMap);
CHECK_FIELD(release_alias_map, ReleaseAliasMap);

static_assert(offsetof(OrtApiBase, GetApi) == offsetof(dlm::ort::ApiBase, get_api));
static_assert(offsetof(OrtApiBase, GetVersionString) ==
              offsetof(dlm::ort::ApiBase, get_version_string));

static_assert(sizeof(ONNXTensorElementDataType) == sizeof(int) &&
              sizeof(OrtErrorCode) == sizeof(int));
static_assert(ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT ==
              static_cast<ONNXTensorElementDataType>(dlm::kFloat));
static_assert(ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32 ==
              static_cast<ONNXTensorElementDataType>(dlm::kInt32));
static_assert(ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64 ==
              static_cast<ONNXTensorElementDataType>(dlm::kInt64));
static_assert(ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16 ==
              static_cast<ONNXTensorElementDataType>(dlm::kFloat16));
static_assert(ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16 ==
              static_cast<ONNXTensorElementDataType>(dlm::kBFloat16));
static_assert(ORT_NO_SUCHFILE == static_cast<OrtErrorCode>(dlm::ort::kNoSuchFile));
static_assert(ORT_NO_MODEL == static_cast<OrtErrorCode>(dlm::ort::kNoModel));
static_assert(ORT_INVALID_PROTOBUF == static_cast<OrtErrorCode>(dlm::ort::kInvalidProtobuf));
static_assert(ORT_INVALID_GRAPH == static_cast<OrtErrorCode>(dlm::ort::kInvalidGraph));
static_assert(ORT_LOGGING_LEVEL_FATAL == dlm::ort::kLogFatal &&
              ORT_SEQUENTIAL == dlm::ort::kSequential);
static_assert(ORT_ENABLE_ALL == dlm::ort::kOptimizeAll &&
              OrtDeviceAllocator == dlm::ort::kDeviceAllocator);
static_assert(OrtMemTypeDefault == dlm::ort::kMemTypeDefault);
static_assert(ORT_INVALID_ARGUMENT == dlm::ort::kInvalidArgument && INPUT_OUTPUT_REQUIRED == 0);
static_assert(INPUT_OUTPUT_OPTIONAL ==
              static_cast<OrtCustomOpInputOutputCharacteristic>(dlm::ort::kOptionalInput));
static_assert(ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8 == 2);

}  // namespace

int main() { return 0; }
