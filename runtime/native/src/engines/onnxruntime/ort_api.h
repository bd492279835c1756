// Declares the part of ONNX Runtime's C API that the engine uses. This file replaces ONNX Runtime's
// official header, because pip wheels do not contain that header.
//
// The library exports one function, OrtGetApiBase, which gives access to OrtApi, a table of
// function pointers. New versions of ONNX Runtime only add functions at the end of the table. So
// the index of a function in the table, its slot, never changes. (The library's
// onnxruntime_c_api.cc asserts where the table of each version ends.)
//
// Below, each function is declared with its slot number and its signature. Enums are passed as int.
// If the official header is installed, tests/ort_slots_check.cc compares the slots, the signatures
// and the values of the enums with the header.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

// Opaque types of ONNX Runtime. They have their official names, so that tests/ort_slots_check.cc
// can compare signatures.
struct OrtAllocator;
struct OrtCUDAProviderOptionsV2;
struct OrtCustomOpDomain;
struct OrtEnv;
struct OrtEpAssignedNode;
struct OrtEpAssignedSubgraph;
struct OrtEpDevice;
struct OrtHardwareDevice;
struct OrtKernelContext;
struct OrtKernelInfo;
struct OrtKeyValuePairs;
struct OrtMemoryInfo;
struct OrtRunOptions;
struct OrtSession;
struct OrtSessionOptions;
struct OrtShapeInferContext;
struct OrtStatus;
struct OrtTensorRTProviderOptionsV2;
struct OrtTensorTypeAndShapeInfo;
struct OrtTypeInfo;
struct OrtValue;

namespace dlm::ort {

// The version of the function table that the engine requests. ONNX Runtime has supported this
// version since release 1.20.
constexpr uint32_t kApiVersion = 20;
// The minor version of ONNX Runtime 1.23, the oldest release that can run graphs of opset 23. All
// bundles use opset 23.
constexpr uint32_t kOpsetVersion = 23;
// The minor version of ONNX Runtime 1.24, the oldest release that reports which provider runs each
// node. With a GPU provider, the engine needs this report.
constexpr uint32_t kPlacementVersion = 24;

struct ApiBase {
  // Returns the table. If the library does not support the version, returns NULL and prints a line
  // to stderr.
  const void* (*get_api)(uint32_t version);
  const char* (*get_version_string)();  // returns a static string such as "1.31.1"
};
using GetApiBase = const ApiBase* (*)();  // the type of OrtGetApiBase

constexpr int kInvalidArgument = 2, kNoSuchFile = 3, kNoModel = 4, kInvalidProtobuf = 7;
constexpr int kInvalidGraph = 10;    // a value of OrtErrorCode
constexpr int kLogFatal = 4;         // OrtLoggingLevel
constexpr int kSequential = 0;       // ExecutionMode
constexpr int kOptimizeAll = 99;     // GraphOptimizationLevel
constexpr int kDeviceAllocator = 0;  // OrtAllocatorType
constexpr int kMemTypeDefault = 0;   // OrtMemType
constexpr int kOptionalInput = 1;    // OrtCustomOpInputOutputCharacteristic

template <size_t kSlot, class Function>
struct Entry {
  static constexpr size_t slot = kSlot;
  using Pointer = Function*;
};

struct CustomOp;

using LoggingFunction = void (*)(void* user, int level, const char* category, const char* log_id,
                                 const char* code_location, const char* message);

// clang-format off
using CreateStatus = Entry<0, OrtStatus*(int code, const char* message)>;
using GetErrorCode = Entry<1, int(const OrtStatus*)>;
using GetErrorMessage = Entry<2, const char*(const OrtStatus*)>;
using CreateEnv = Entry<3, OrtStatus*(int level, const char* log_id, OrtEnv**)>;
using CreateSession = Entry<7, OrtStatus*(const OrtEnv*, const char* path, const OrtSessionOptions*, OrtSession**)>;
using Run = Entry<9, OrtStatus*(OrtSession*, const OrtRunOptions*, const char* const* input_names,
                                const OrtValue* const* inputs, size_t input_count, const char* const* output_names,
                                size_t output_count, OrtValue** outputs)>;
using CreateSessionOptions = Entry<10, OrtStatus*(OrtSessionOptions**)>;
using SetSessionExecutionMode = Entry<13, OrtStatus*(OrtSessionOptions*, int mode)>;
using DisableMemPattern = Entry<17, OrtStatus*(OrtSessionOptions*)>;
using SetSessionLogSeverityLevel = Entry<22, OrtStatus*(OrtSessionOptions*, int level)>;
using SetSessionGraphOptimizationLevel = Entry<23, OrtStatus*(OrtSessionOptions*, int level)>;
using SetIntraOpNumThreads = Entry<24, OrtStatus*(OrtSessionOptions*, int threads)>;
using SetInterOpNumThreads = Entry<25, OrtStatus*(OrtSessionOptions*, int threads)>;
using CreateCustomOpDomain = Entry<26, OrtStatus*(const char* domain, OrtCustomOpDomain**)>;
using CustomOpDomainAdd = Entry<27, OrtStatus*(OrtCustomOpDomain*, const CustomOp*)>;
using AddCustomOpDomain = Entry<28, OrtStatus*(OrtSessionOptions*, OrtCustomOpDomain*)>;
using SessionGetInputCount = Entry<30, OrtStatus*(const OrtSession*, size_t*)>;
using SessionGetOutputCount = Entry<31, OrtStatus*(const OrtSession*, size_t*)>;
// ONNX Runtime calls optional inputs "overridable initializers".
using SessionGetOptionalInputCount = Entry<32, OrtStatus*(const OrtSession*, size_t*)>;
using SessionGetInputTypeInfo = Entry<33, OrtStatus*(const OrtSession*, size_t index, OrtTypeInfo**)>;
using SessionGetOutputTypeInfo = Entry<34, OrtStatus*(const OrtSession*, size_t index, OrtTypeInfo**)>;
using SessionGetOptionalInputTypeInfo = Entry<35, OrtStatus*(const OrtSession*, size_t index, OrtTypeInfo**)>;
using SessionGetInputName = Entry<36, OrtStatus*(const OrtSession*, size_t index, OrtAllocator*, char**)>;
using SessionGetOutputName = Entry<37, OrtStatus*(const OrtSession*, size_t index, OrtAllocator*, char**)>;
using SessionGetOptionalInputName = Entry<38, OrtStatus*(const OrtSession*, size_t index, OrtAllocator*, char**)>;
using CreateRunOptions = Entry<39, OrtStatus*(OrtRunOptions**)>;
using CreateTensorWithDataAsOrtValue = Entry<49, OrtStatus*(const OrtMemoryInfo*, void* data, size_t bytes,
                                                            const int64_t* shape, size_t rank, int type, OrtValue**)>;
using GetTensorMutableData = Entry<51, OrtStatus*(OrtValue*, void**)>;
using CastTypeInfoToTensorInfo = Entry<55, OrtStatus*(const OrtTypeInfo*, const OrtTensorTypeAndShapeInfo**)>;
using GetTensorElementType = Entry<60, OrtStatus*(const OrtTensorTypeAndShapeInfo*, int*)>;
using GetDimensionsCount = Entry<61, OrtStatus*(const OrtTensorTypeAndShapeInfo*, size_t*)>;
using GetDimensions = Entry<62, OrtStatus*(const OrtTensorTypeAndShapeInfo*, int64_t*, size_t rank)>;
using GetTensorTypeAndShape = Entry<65, OrtStatus*(const OrtValue*, OrtTensorTypeAndShapeInfo**)>;
using CreateMemoryInfo = Entry<68, OrtStatus*(const char* name, int allocator_type, int device, int memory_type, OrtMemoryInfo**)>;
using CreateCpuMemoryInfo = Entry<69, OrtStatus*(int allocator_type, int memory_type, OrtMemoryInfo**)>;
using AllocatorAlloc = Entry<75, OrtStatus*(OrtAllocator*, size_t, void**)>;
using AllocatorFree = Entry<76, OrtStatus*(OrtAllocator*, void*)>;
using GetAllocatorWithDefaultOptions = Entry<78, OrtStatus*(OrtAllocator**)>;
using KernelInfoGetAttributeFloat = Entry<85, OrtStatus*(const OrtKernelInfo*, const char* name, float*)>;
using KernelInfoGetAttributeInt64 = Entry<86, OrtStatus*(const OrtKernelInfo*, const char* name, int64_t*)>;
using KernelContextGetInputCount = Entry<88, OrtStatus*(const OrtKernelContext*, size_t*)>;
using KernelContextGetInput = Entry<90, OrtStatus*(const OrtKernelContext*, size_t index, const OrtValue**)>;
using KernelContextGetOutput = Entry<91, OrtStatus*(OrtKernelContext*, size_t index, const int64_t* shape, size_t rank,
                                                    OrtValue**)>;
using ReleaseEnv = Entry<92, void(OrtEnv*)>;
using ReleaseStatus = Entry<93, void(OrtStatus*)>;
using ReleaseMemoryInfo = Entry<94, void(OrtMemoryInfo*)>;
using ReleaseSession = Entry<95, void(OrtSession*)>;
using ReleaseValue = Entry<96, void(OrtValue*)>;
using ReleaseRunOptions = Entry<97, void(OrtRunOptions*)>;
using ReleaseTypeInfo = Entry<98, void(OrtTypeInfo*)>;
using ReleaseTensorTypeAndShapeInfo = Entry<99, void(OrtTensorTypeAndShapeInfo*)>;
using ReleaseSessionOptions = Entry<100, void(OrtSessionOptions*)>;
using ReleaseCustomOpDomain = Entry<101, void(OrtCustomOpDomain*)>;
using GetAvailableProviders = Entry<125, OrtStatus*(char*** names, int* count)>;
using ReleaseAvailableProviders = Entry<126, OrtStatus*(char** names, int count)>;
using AddSessionConfigEntry = Entry<130, OrtStatus*(OrtSessionOptions*, const char* key, const char* value)>;
using ReleaseAllocator = Entry<132, void(OrtAllocator*)>;
using KernelInfoGetAttributeArrayInt64 = Entry<163, OrtStatus*(const OrtKernelInfo*, const char* name, int64_t*, size_t*)>;
using AddRunConfigEntry = Entry<165, OrtStatus*(OrtRunOptions*, const char* key, const char* value)>;
using AppendTensorRtProvider = Entry<170, OrtStatus*(OrtSessionOptions*, const OrtTensorRTProviderOptionsV2*)>;
using CreateTensorRtProviderOptions = Entry<171, OrtStatus*(OrtTensorRTProviderOptionsV2**)>;
using UpdateTensorRtProviderOptions = Entry<172, OrtStatus*(OrtTensorRTProviderOptionsV2*, const char* const* keys,
                                                            const char* const* values, size_t count)>;
using ReleaseTensorRtProviderOptions = Entry<174, void(OrtTensorRTProviderOptionsV2*)>;
using AppendCudaProvider = Entry<204, OrtStatus*(OrtSessionOptions*, const OrtCUDAProviderOptionsV2*)>;
using CreateCudaProviderOptions = Entry<205, OrtStatus*(OrtCUDAProviderOptionsV2**)>;
using UpdateCudaProviderOptions = Entry<206, OrtStatus*(OrtCUDAProviderOptionsV2*, const char* const* keys,
                                                        const char* const* values, size_t count)>;
using ReleaseCudaProviderOptions = Entry<208, void(OrtCUDAProviderOptionsV2*)>;
using KernelContextGetAllocator = Entry<253, OrtStatus*(const OrtKernelContext*, const OrtMemoryInfo*, OrtAllocator**)>;
using SetUserLoggingFunction = Entry<266, OrtStatus*(OrtSessionOptions*, LoggingFunction, void* user)>;
using KernelContextParallelFor = Entry<274, OrtStatus*(const OrtKernelContext*, void (*)(void*, size_t), size_t total,
                                                       size_t batches, void* user)>;
// These functions exist since version 22. ONNX Runtime owns the results.
using GetKeyValue = Entry<297, const char*(const OrtKeyValuePairs*, const char* key)>;
using RegisterProviderLibrary = Entry<301, OrtStatus*(OrtEnv*, const char* name, const char* path)>;
using UnregisterProviderLibrary = Entry<302, OrtStatus*(OrtEnv*, const char* name)>;
using GetProviderDevices = Entry<303, OrtStatus*(const OrtEnv*, const OrtEpDevice* const**, size_t*)>;
using AppendProviderDevices = Entry<304, OrtStatus*(OrtSessionOptions*, OrtEnv*, const OrtEpDevice* const*, size_t device_count,
                                                    const char* const* keys, const char* const* values, size_t count)>;
using HardwareGetMetadata = Entry<311, const OrtKeyValuePairs*(const OrtHardwareDevice*)>;
using ProviderDeviceGetProvider = Entry<312, const char*(const OrtEpDevice*)>;
using ProviderDeviceGetMetadata = Entry<314, const OrtKeyValuePairs*(const OrtEpDevice*)>;
using ProviderDeviceGetHardware = Entry<316, const OrtHardwareDevice*(const OrtEpDevice*)>;
// These functions exist since the version kPlacementVersion. The session owns the results.
using GetPlacement = Entry<407, OrtStatus*(const OrtSession*, const OrtEpAssignedSubgraph* const**, size_t*)>;
using PlacementGetProvider = Entry<408, OrtStatus*(const OrtEpAssignedSubgraph*, const char**)>;
using PlacementGetNodes = Entry<409, OrtStatus*(const OrtEpAssignedSubgraph*, const OrtEpAssignedNode* const**, size_t*)>;
using PlacedNodeGetName = Entry<410, OrtStatus*(const OrtEpAssignedNode*, const char**)>;
using PlacedNodeGetDomain = Entry<411, OrtStatus*(const OrtEpAssignedNode*, const char**)>;
using PlacedNodeGetOperator = Entry<412, OrtStatus*(const OrtEpAssignedNode*, const char**)>;
// clang-format on

// OrtCustomOp of ONNX Runtime: the functions that define a custom operator. Some functions have a
// second version whose name ends with v2. ONNX Runtime then calls only the second version.
struct CustomOp {
  uint32_t version;  // API version that defines the members below
  void* (*create_kernel)(const CustomOp*, const void* api, const OrtKernelInfo*);
  const char* (*get_name)(const CustomOp*);
  const char* (*get_provider)(const CustomOp*);  // NULL: the operator runs on the CPU
  int (*get_input_type)(const CustomOp*, size_t);
  size_t (*get_input_count)(const CustomOp*);
  int (*get_output_type)(const CustomOp*, size_t);
  size_t (*get_output_count)(const CustomOp*);
  void (*compute)(void*, OrtKernelContext*);
  void (*destroy_kernel)(void*);
  int (*get_input_kind)(const CustomOp*, size_t);  // returns 0 if the input is required
  int (*get_output_kind)(const CustomOp*, size_t);
  int (*get_input_memory)(const CustomOp*, size_t);
  int (*get_variadic_input_minimum)(const CustomOp*);
  int (*get_variadic_input_homogeneity)(const CustomOp*);
  int (*get_variadic_output_minimum)(const CustomOp*);
  int (*get_variadic_output_homogeneity)(const CustomOp*);
  OrtStatus* (*create_kernel_v2)(const CustomOp*, const void* api, const OrtKernelInfo*,
                                 void** kernel);
  OrtStatus* (*compute_v2)(void* kernel, OrtKernelContext*);
  OrtStatus* (*infer_shape)(const CustomOp*, OrtShapeInferContext*);
  int (*get_start_version)(const CustomOp*);
  int (*get_end_version)(const CustomOp*);
  size_t (*get_may_inplace)(int**, int**);
  void (*release_may_inplace)(int*, int*);
  size_t (*get_alias_map)(int**, int**);
  void (*release_alias_map)(int*, int*);
};

// The table OrtApi. Code accesses its functions by slot number.
class Api {
 public:
  Api() = default;
  explicit Api(const void* table) : table_(static_cast<const char*>(table)) {}

  // Calls a function of the table. For example: api.call<CreateEnv>(kLogFatal, "dlm", &env).
  template <class Function, class... Arguments>
  auto call(Arguments... arguments) const {
    typename Function::Pointer function;
    std::memcpy(&function, table_ + Function::slot * sizeof(void*), sizeof function);
    return function(arguments...);
  }

  // Returns the address of the table. The address identifies the loaded library, because each
  // library has its own table.
  const void* table() const { return table_; }

 private:
  const char* table_ = nullptr;
};

}  // namespace dlm::ort
