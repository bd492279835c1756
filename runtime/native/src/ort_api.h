// The part of ONNX Runtime's C API that the engine uses, declared here because no pip wheel holds the header.
//
// The library exports one function, OrtGetApiBase. It leads to OrtApi, a table of function pointers that only grows at its
// end (the library's own onnxruntime_c_api.cc asserts where each version's table ends), so a slot's number never changes.
// Below each function stands as its slot and its signature; tests/ort_slots_check.cc compares both, and the numbers of the
// enums, with the official header wherever that is installed. Enums are passed as int.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

// Opaque to us; the names are the official ones, so that the check can compare signatures.
struct OrtAllocator;
struct OrtEnv;
struct OrtMemoryInfo;
struct OrtRunOptions;
struct OrtSession;
struct OrtSessionOptions;
struct OrtStatus;
struct OrtTensorTypeAndShapeInfo;
struct OrtTypeInfo;
struct OrtValue;

namespace dlm::ort {

// The oldest version whose table we ask for: libraries from 1.20 on give it, newer ones with more slots behind.
constexpr uint32_t kApiVersion = 20;

struct ApiBase {
  const void* (*get_api)(uint32_t version);  // null, and a line on stderr, if the library is older
  const char* (*get_version_string)();       // "1.31.1", static
};
using GetApiBase = const ApiBase* (*)();  // the type of OrtGetApiBase

enum ErrorCode : int { kNoSuchFile = 3, kNoModel = 4, kInvalidProtobuf = 7, kNotImplemented = 9, kInvalidGraph = 10 };
constexpr int kLogFatal = 4;         // OrtLoggingLevel
constexpr int kSequential = 0;       // ExecutionMode
constexpr int kOptimizeAll = 99;     // GraphOptimizationLevel
constexpr int kDeviceAllocator = 0;  // OrtAllocatorType
constexpr int kMemTypeDefault = 0;   // OrtMemType

template <size_t kSlot, class Function>
struct Entry {
  static constexpr size_t slot = kSlot;
  using Pointer = Function*;
};


// clang-format off
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
using SessionGetInputCount = Entry<30, OrtStatus*(const OrtSession*, size_t*)>;
using SessionGetOutputCount = Entry<31, OrtStatus*(const OrtSession*, size_t*)>;
using SessionGetInputTypeInfo = Entry<33, OrtStatus*(const OrtSession*, size_t index, OrtTypeInfo**)>;
using SessionGetOutputTypeInfo = Entry<34, OrtStatus*(const OrtSession*, size_t index, OrtTypeInfo**)>;
using SessionGetInputName = Entry<36, OrtStatus*(const OrtSession*, size_t index, OrtAllocator*, char**)>;
using SessionGetOutputName = Entry<37, OrtStatus*(const OrtSession*, size_t index, OrtAllocator*, char**)>;
using CreateTensorWithDataAsOrtValue = Entry<49, OrtStatus*(const OrtMemoryInfo*, void* data, size_t bytes,
                                                            const int64_t* shape, size_t rank, int type, OrtValue**)>;
using CastTypeInfoToTensorInfo = Entry<55, OrtStatus*(const OrtTypeInfo*, const OrtTensorTypeAndShapeInfo**)>;
using GetTensorElementType = Entry<60, OrtStatus*(const OrtTensorTypeAndShapeInfo*, int*)>;
using GetDimensionsCount = Entry<61, OrtStatus*(const OrtTensorTypeAndShapeInfo*, size_t*)>;
using GetDimensions = Entry<62, OrtStatus*(const OrtTensorTypeAndShapeInfo*, int64_t*, size_t rank)>;
using CreateCpuMemoryInfo = Entry<69, OrtStatus*(int allocator_type, int memory_type, OrtMemoryInfo**)>;
using AllocatorFree = Entry<76, OrtStatus*(OrtAllocator*, void*)>;
using GetAllocatorWithDefaultOptions = Entry<78, OrtStatus*(OrtAllocator**)>;
using ReleaseEnv = Entry<92, void(OrtEnv*)>;
using ReleaseStatus = Entry<93, void(OrtStatus*)>;
using ReleaseMemoryInfo = Entry<94, void(OrtMemoryInfo*)>;
using ReleaseSession = Entry<95, void(OrtSession*)>;
using ReleaseValue = Entry<96, void(OrtValue*)>;
using ReleaseTypeInfo = Entry<98, void(OrtTypeInfo*)>;
using ReleaseSessionOptions = Entry<100, void(OrtSessionOptions*)>;
using AddSessionConfigEntry = Entry<130, OrtStatus*(OrtSessionOptions*, const char* key, const char* value)>;
// clang-format on

// OrtApi as what it is to us: numbered slots.
class Api {
 public:
  Api() = default;
  explicit Api(const void* table) : table_(static_cast<const char*>(table)) {}

  // Calls the function of an Entry: api.call<CreateEnv>(kLogFatal, "dlm", &env).
  template <class Function, class... Arguments>
  auto call(Arguments... arguments) const {
    typename Function::Pointer function;
    std::memcpy(&function, table_ + Function::slot * sizeof(void*), sizeof function);
    return function(arguments...);
  }

 private:
  const char* table_ = nullptr;
};

}  // namespace dlm::ort
