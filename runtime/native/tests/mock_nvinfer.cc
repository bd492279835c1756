// A mock of libnvinfer. It implements the classes of TensorRT 10.14's headers, and runs the
// denoiser of mock_denoiser.h.
//
// An engine file for this mock is a text with these lines. Types are numbers of nvinfer1::DataType.
//   mock-engine
//   denoiser VOCAB MASK TOP_K CACHE_TYPE
//   layer KV_HEADS HEAD_SIZE               (once per layer)
//   conditioning C                         (only if the denoiser has self-conditioning)
//   profile T_MIN T_OPT T_MAX S_MIN S_OPT S_MAX R_MIN R_OPT R_MAX    (once per profile)
//   rename PORT NAME                       (replaces the port's name)
// To describe an invalid engine, the file may also have the lines "without PORT", "extra OUTPUT",
// "type PORT TYPE", "host PORT", "nan", or "chatty" (the engine reports an error and continues).
// $MOCK_TRT_VERSION is the version that the mock reports (default 10.14.1.48). $MOCK_CUDA_FAIL
// lists the calls that fail.
//
// The mock is stricter than TensorRT. An enqueue checks every address against the mock's device
// memory, and checks that tensors do not overlap. A context with new shapes cannot be captured. If
// a graph is replayed after its context has changed or was destroyed, the mock counts an error.
#include <NvInferRuntime.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <set>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "mock_cuda.h"
#include "mock_denoiser.h"

namespace {

using nvinfer1::DataType;
using nvinfer1::Dims;
using nvinfer1::OptProfileSelector;
using nvinfer1::TensorIOMode;

constexpr int64_t kT = -1, kS = -2, kR = -3;
constexpr size_t kWorkingBytes[] = {4096, 1000};  // the working memory that each profile needs

struct Tensor {
  bool is_input;
  DataType type;
  std::vector<int64_t> dims;
  bool is_on_host = false;
  std::string role{};  // the port's name before `rename`
};

size_t element_bytes(DataType type) {
  return type == DataType::kINT64 ? 8 : type == DataType::kHALF || type == DataType::kBF16 ? 2 : 4;
}

struct Plan {
  mock::Shape shape{};
  std::vector<std::pair<std::string, Tensor>> tensors;
  struct Range {
    int32_t tokens[3], cached[3], rows[3];
  };
  std::vector<Range> profiles;
  bool is_nan = false, is_chatty = false;

  // Returns false if the text is not an engine file.
  bool read(const std::string& text) {
    std::istringstream in(text);
    std::string word, name;
    if (!(in >> word) || word != "mock-engine") return false;
    while (in >> word) {
      if (word == "denoiser") {
        int32_t type = 0;
        in >> shape.vocab >> shape.mask >> shape.top_k >> type;
        cache = static_cast<DataType>(type);
        list();
      } else if (word == "layer") {
        int32_t kv_heads = 0, head_size = 0;
        in >> kv_heads >> head_size;
        add_layer(kv_heads, head_size);
      } else if (word == "conditioning") {
        in >> shape.conditioning;
        put("conditioning", true, DataType::kFLOAT, {-1, kT, shape.conditioning});
        put("temperature", true, DataType::kFLOAT, {-1, kR});
        put("next_conditioning", false, DataType::kFLOAT, {-1, kR, shape.conditioning});
      } else if (word == "rename") {
        std::string old;
        in >> old >> name;
        for (auto& [known, tensor] : tensors)
          if (known == old) known = name;
      } else if (word == "profile") {
        Range range{};
        for (auto* const sizes : {range.tokens, range.cached, range.rows})
          in >> sizes[0] >> sizes[1] >> sizes[2];
        profiles.push_back(range);
      } else if (word == "without" && in >> name) {
        for (size_t i = 0; i < tensors.size(); ++i)
          if (tensors[i].first == name)
            tensors.erase(tensors.begin() + static_cast<std::ptrdiff_t>(i));
      } else if (word == "extra" && in >> name) {
        tensors.push_back({name, {false, DataType::kFLOAT, {1, kR}}});
      } else if (word == "type" && in >> name) {
        int32_t type = 0;
        in >> type;
        find(name)->type = static_cast<DataType>(type);
      } else if (word == "host" && in >> name) {
        find(name)->is_on_host = true;
      } else if (word == "nan") {
        is_nan = true;
      } else if (word == "chatty") {
        is_chatty = true;
      }
      if (in.fail()) return false;
    }
    return !shape.layers.empty();
  }

  const std::string& name_of(const std::string& role) const {
    for (const auto& [name, tensor] : tensors)
      if (tensor.role == role) return name;
    std::fprintf(stderr, "mock_nvinfer: no tensor %s\n", role.c_str());
    std::abort();
  }

  Tensor* find(const std::string& name) {
    for (auto& [known, tensor] : tensors)
      if (known == name) return &tensor;
    std::fprintf(stderr, "mock_nvinfer: no tensor %s\n", name.c_str());
    std::abort();
  }

 private:
  void put(const std::string& name, bool is_input, DataType type, std::vector<int64_t> dims) {
    tensors.push_back({name, {is_input, type, std::move(dims), false, name}});
  }

  void list() {
    put("input_ids", true, DataType::kINT64, {-1, kT});
    put("position_ids", true, DataType::kINT64, {-1, kT});
    put("score_rows", true, DataType::kINT64, {-1, kR});
    put("top_token", false, DataType::kINT32, {-1, kR, shape.top_k});
    put("top_prob", false, DataType::kFLOAT, {-1, kR, shape.top_k});
    put("top_log_odds", false, DataType::kFLOAT, {-1, kR, shape.top_k});
    put("entropy", false, DataType::kFLOAT, {-1, kR});
    put("logits", false, DataType::kFLOAT, {-1, kR, shape.vocab});
  }

  void add_layer(int32_t kv_heads, int32_t head_size) {
    const std::string number = std::to_string(shape.layers.size());
    shape.layers.push_back({kv_heads, head_size * static_cast<int32_t>(element_bytes(cache))});
    for (const char* const what : {"key.", "value."}) {
      put("past_" + (what + number), true, cache, {-1, kv_heads, kS, head_size});
      put("present_" + (what + number), false, cache, {-1, kv_heads, kT, head_size});
    }
  }

  DataType cache = DataType::kFLOAT;
};

Dims to_dims(const std::vector<int64_t>& dims, int64_t tokens, int64_t cached, int64_t rows) {
  Dims out{};
  out.nbDims = static_cast<int32_t>(dims.size());
  for (size_t i = 0; i < dims.size(); ++i)
    out.d[i] = i == 0          ? 1
               : dims[i] == kT ? tokens
               : dims[i] == kS ? cached
               : dims[i] == kR ? rows
                               : dims[i];
  return out;
}

// The state of an execution context. A captured graph may be replayed only if the state has not
// changed since the capture.
struct Generation {
  int number = 0;
  bool is_alive = true;
};

// The virtual functions that the tests do not use.
#define NOTHING(signature, value) \
  signature noexcept override { return value; }

class MockContext final : public nvinfer1::IExecutionContext,
                          public nvinfer1::apiv::VExecutionContext {
 public:
  MockContext(const nvinfer1::ICudaEngine& engine, const Plan& plan, nvinfer1::ILogger& logger)
      : engine_(engine), plan_(plan), logger_(logger) {
    mImpl = this;
  }
  ~MockContext() noexcept override { generation_->is_alive = false; }

  void setDeviceMemoryV2(void* memory, int64_t size) noexcept override {
    working_ = reinterpret_cast<CUdeviceptr>(memory), working_bytes_ = static_cast<size_t>(size);
  }
  bool setOptimizationProfileAsync(int32_t index, cudaStream_t) noexcept override {
    if (mock::note("setOptimizationProfileAsync")) return refuse("the profile is bad");
    profile_ = index;
    return change();
  }
  bool setTensorAddress(const char* name, void* data) noexcept override {
    addresses_[name] = reinterpret_cast<CUdeviceptr>(data);
    return change();
  }
  bool setInputShape(const char* name, const Dims& dims) noexcept override {
    if (profile_ < 0 || mock::note("setInputShape")) return refuse("the shape is bad");
    std::vector<int64_t> given(dims.d, dims.d + dims.nbDims);
    const Dims low = shape_of(name, 0), high = shape_of(name, 2);
    for (int32_t i = 0; i < dims.nbDims; ++i)
      if (dims.nbDims != low.nbDims || dims.d[i] < low.d[i] || dims.d[i] > high.d[i])
        return refuse("the shape is outside the profile");
    shapes_[name] = given;
    return change();
  }

  bool enqueueV3(cudaStream_t stream) noexcept override {
    if (mock::note("enqueueV3")) return refuse("the kernel is bad");
    if (mock::is_capturing(stream) && !is_warm_)
      return refuse("shapes are new: enqueue once before capturing");
    std::map<std::string, void*> data;
    std::map<CUdeviceptr, CUdeviceptr> ranges;
    for (const auto& [name, tensor] : plan_.tensors)
      if (tensor.is_input && shapes_.count(name) == 0) return refuse("no shape for " + name);
    const int64_t tokens = given("input_ids")[1], cached = given("past_key.0")[2],
                  rows = given("score_rows")[1];
    if (given("position_ids")[1] != tokens) return refuse("ids and positions differ");
    for (const auto& [name, tensor] : plan_.tensors) {
      const Dims dims = to_dims(tensor.dims, tokens, cached, rows);
      if (tensor.is_input && shapes_[name] != std::vector<int64_t>(dims.d, dims.d + dims.nbDims))
        return refuse("another shape: " + name);
      size_t bytes = element_bytes(tensor.type);
      for (int32_t i = 0; i < dims.nbDims; ++i) bytes *= static_cast<size_t>(dims.d[i]);
      if (addresses_[name] == 0) return refuse("no address for " + name);
      data[tensor.role] = mock::view(addresses_[name], bytes);
      if (data[tensor.role] == nullptr) return refuse("outside device memory: " + name);
      if (!ranges.emplace(addresses_[name], addresses_[name] + std::max<size_t>(bytes, 1)).second)
        return refuse("an address twice: " + name);
    }
    if (working_bytes_ < kWorkingBytes[profile_]) return refuse("too little working memory");
    void* const working = mock::view(working_, working_bytes_);
    if (working == nullptr || !ranges.emplace(working_, working_ + working_bytes_).second)
      return refuse("working memory is bad");
    for (auto one = ranges.begin(), next = std::next(one); next != ranges.end(); ++one, ++next)
      if (one->second > next->first) return refuse("tensors overlap");
    const bool is_captured = mock::is_capturing(stream);
    mock::submit(stream, [=, plan = plan_, generation = generation_, number = generation_->number,
                          bytes = working_bytes_]() mutable {
      if (is_captured && (!generation->is_alive || generation->number != number))
        mock::note("stale_graph");
      std::memset(working, 0xAB, bytes);
      mock::Pass pass{};
      pass.tokens = static_cast<int32_t>(tokens), pass.cached = static_cast<int32_t>(cached),
      pass.rows = static_cast<int32_t>(rows);
      pass.ids = static_cast<int64_t*>(data["input_ids"]),
      pass.positions = static_cast<int64_t*>(data["position_ids"]);
      pass.score_rows = static_cast<int64_t*>(data["score_rows"]);
      pass.top_tokens = static_cast<int32_t*>(data["top_token"]),
      pass.top_probs = static_cast<float*>(data["top_prob"]);
      pass.top_log_odds = static_cast<float*>(data["top_log_odds"]);
      pass.entropy = static_cast<float*>(data["entropy"]),
      pass.logits = static_cast<float*>(data["logits"]);
      if (plan.shape.conditioning > 0) {
        pass.conditioning = static_cast<float*>(data["conditioning"]);
        pass.temperature = static_cast<float*>(data["temperature"]);
        pass.next_conditioning = static_cast<float*>(data["next_conditioning"]);
      }
      for (size_t i = 0; i < plan.shape.layers.size(); ++i)
        for (const char* const what : {"key.", "value."}) {
          pass.past.push_back(static_cast<uint8_t*>(data["past_" + (what + std::to_string(i))]));
          pass.present.push_back(
              static_cast<uint8_t*>(data["present_" + (what + std::to_string(i))]));
        }
      mock::denoise(plan.shape, pass);
      if (plan.is_nan) pass.top_probs[0] = __builtin_nanf("");
    });
    if (plan_.is_chatty) refuse("nothing to worry about");
    is_warm_ = true;
    return true;
  }

  NOTHING(nvinfer1::IExecutionContext* getPImpl(), this)
  NOTHING(void setDebugSync(bool), )
  NOTHING(bool getDebugSync() const, false)
  NOTHING(void setProfiler(nvinfer1::IProfiler*), )
  NOTHING(nvinfer1::IProfiler* getProfiler() const, nullptr)
  NOTHING(const nvinfer1::ICudaEngine& getEngine() const, engine_)
  NOTHING(void setName(const char*), )
  NOTHING(const char* getName() const, "")
  NOTHING(void setDeviceMemory(void*), )
  NOTHING(int32_t getOptimizationProfile() const, profile_)
  NOTHING(bool allInputDimensionsSpecified() const, false)
  NOTHING(bool allInputShapesSpecified() const, false)
  NOTHING(void setErrorRecorder(nvinfer1::IErrorRecorder*), )
  NOTHING(nvinfer1::IErrorRecorder* getErrorRecorder() const, nullptr)
  NOTHING(bool executeV2(void* const*), false)
  NOTHING(void setEnqueueEmitsProfile(bool), )
  NOTHING(bool getEnqueueEmitsProfile() const, false)
  NOTHING(bool reportToProfiler() const, false)
  NOTHING(Dims getTensorShape(const char*) const, Dims{})
  NOTHING(Dims getTensorStrides(const char*) const, Dims{})
  NOTHING(const void* getTensorAddress(const char*) const, nullptr)
  NOTHING(bool setInputTensorAddress(const char*, const void*), false)
  NOTHING(bool setOutputTensorAddress(const char*, void*), false)
  NOTHING(int32_t inferShapes(int32_t, const char**), 0)
  NOTHING(bool setInputConsumedEvent(cudaEvent_t), false)
  NOTHING(cudaEvent_t getInputConsumedEvent() const, nullptr)
  NOTHING(void* getOutputTensorAddress(const char*) const, nullptr)
  NOTHING(bool setOutputAllocator(const char*, nvinfer1::IOutputAllocator*), false)
  NOTHING(nvinfer1::IOutputAllocator* getOutputAllocator(const char*), nullptr)
  NOTHING(int64_t getMaxOutputSize(const char*) const, 0)
  NOTHING(bool setTemporaryStorageAllocator(nvinfer1::IGpuAllocator*), false)
  NOTHING(nvinfer1::IGpuAllocator* getTemporaryStorageAllocator() const, nullptr)
  NOTHING(void setPersistentCacheLimit(size_t), )
  NOTHING(size_t getPersistentCacheLimit() const, 0)
  NOTHING(bool setNvtxVerbosity(nvinfer1::ProfilingVerbosity), false)
  NOTHING(nvinfer1::ProfilingVerbosity getNvtxVerbosity() const,
          nvinfer1::ProfilingVerbosity::kNONE)
  NOTHING(void setAuxStreams(cudaStream_t*, int32_t), )
  NOTHING(bool setDebugListener(nvinfer1::IDebugListener*), false)
  NOTHING(nvinfer1::IDebugListener* getDebugListener(), nullptr)
  NOTHING(bool setTensorDebugState(const char*, bool), false)
  NOTHING(bool getDebugState(const char*) const, false)
  NOTHING(bool setAllTensorsDebugState(bool), false)
  NOTHING(size_t updateDeviceMemorySizeForShapes(), 0)
  NOTHING(nvinfer1::IRuntimeConfig* getRuntimeConfig() const, nullptr)
  NOTHING(bool setUnfusedTensorsDebugState(bool), false)
  NOTHING(bool getUnfusedTensorsDebugState() const, false)

 private:
  bool change() {
    ++generation_->number;
    is_warm_ = false;
    return true;
  }
  bool refuse(const std::string& reason) {
    logger_.log(nvinfer1::ILogger::Severity::kERROR, reason.c_str());
    return false;
  }
  const std::vector<int64_t>& given(const std::string& role) {
    return shapes_[plan_.name_of(role)];
  }
  Dims shape_of(const std::string& name, int32_t end) {
    const Plan::Range& range = plan_.profiles[static_cast<size_t>(profile_)];
    return to_dims(plan_.find(name)->dims, range.tokens[end], range.cached[end], range.rows[end]);
  }

  const nvinfer1::ICudaEngine& engine_;
  Plan plan_;
  nvinfer1::ILogger& logger_;
  std::shared_ptr<Generation> generation_ = std::make_shared<Generation>();
  std::map<std::string, std::vector<int64_t>> shapes_;
  std::map<std::string, CUdeviceptr> addresses_;
  CUdeviceptr working_ = 0;
  size_t working_bytes_ = 0;
  int32_t profile_ = -1;
  bool is_warm_ = false;
};

class MockEngine final : public nvinfer1::ICudaEngine, public nvinfer1::apiv::VCudaEngine {
 public:
  MockEngine(Plan plan, nvinfer1::ILogger& logger) : plan_(std::move(plan)), logger_(logger) {
    mImpl = this;
  }

  nvinfer1::IExecutionContext* createExecutionContext(
      nvinfer1::ExecutionContextAllocationStrategy strategy) noexcept override {
    if (mock::note("createExecutionContext")) return nullptr;
    const bool is_ours = strategy == nvinfer1::ExecutionContextAllocationStrategy::kUSER_MANAGED;
    return is_ours ? new MockContext(*this, plan_, logger_) : nullptr;
  }
  int32_t getNbOptimizationProfiles() const noexcept override {
    return static_cast<int32_t>(plan_.profiles.size());
  }
  int32_t getNbIOTensors() const noexcept override {
    return static_cast<int32_t>(plan_.tensors.size());
  }
  const char* getIOTensorName(int32_t index) const noexcept override {
    return plan_.tensors[static_cast<size_t>(index)].first.c_str();
  }
  Dims getTensorShape(const char* name) const noexcept override {
    Dims dims{};
    const Tensor& tensor = find(name);
    dims.nbDims = static_cast<int32_t>(tensor.dims.size());
    for (size_t i = 0; i < tensor.dims.size(); ++i)
      dims.d[i] = std::max<int64_t>(tensor.dims[i], -1);
    return dims;
  }
  DataType getTensorDataType(const char* name) const noexcept override { return find(name).type; }
  nvinfer1::TensorLocation getTensorLocation(const char* name) const noexcept override {
    return find(name).is_on_host ? nvinfer1::TensorLocation::kHOST
                                 : nvinfer1::TensorLocation::kDEVICE;
  }
  TensorIOMode getTensorIOMode(const char* name) const noexcept override {
    return find(name).is_input ? TensorIOMode::kINPUT : TensorIOMode::kOUTPUT;
  }
  Dims getProfileShape(const char* name, int32_t index,
                       OptProfileSelector select) const noexcept override {
    const Plan::Range& range = plan_.profiles[static_cast<size_t>(index)];
    const int end = select == OptProfileSelector::kMIN   ? 0
                    : select == OptProfileSelector::kOPT ? 1
                                                         : 2;
    return to_dims(find(name).dims, range.tokens[end], range.cached[end], range.rows[end]);
  }
  int64_t getDeviceMemorySizeForProfileV2(int32_t index) const noexcept override {
    return static_cast<int64_t>(kWorkingBytes[index]);
  }

  NOTHING(nvinfer1::ICudaEngine* getPImpl(), this)
  NOTHING(int32_t getNbLayers() const, 0)
  NOTHING(nvinfer1::IHostMemory* serialize() const, nullptr)
  NOTHING(nvinfer1::IExecutionContext* createExecutionContextWithoutDeviceMemory(), nullptr)
  NOTHING(size_t getDeviceMemorySize() const, 0)
  NOTHING(bool isRefittable() const, false)
  NOTHING(const char* getName() const, "")
  NOTHING(const int32_t* getProfileTensorValues(const char*, int32_t, OptProfileSelector) const,
          nullptr)
  NOTHING(nvinfer1::EngineCapability getEngineCapability() const,
          nvinfer1::EngineCapability::kSTANDARD)
  NOTHING(void setErrorRecorder(nvinfer1::IErrorRecorder*), )
  NOTHING(nvinfer1::IErrorRecorder* getErrorRecorder() const, nullptr)
  NOTHING(bool hasImplicitBatchDimension() const, false)
  NOTHING(nvinfer1::TacticSources getTacticSources() const, 0)
  NOTHING(nvinfer1::ProfilingVerbosity getProfilingVerbosity() const,
          nvinfer1::ProfilingVerbosity::kNONE)
  NOTHING(nvinfer1::IEngineInspector* createEngineInspector() const, nullptr)
  NOTHING(bool isShapeInferenceIO(const char*) const, false)
  NOTHING(int32_t getTensorBytesPerComponent(const char*) const, 0)
  NOTHING(int32_t getTensorComponentsPerElement(const char*) const, 0)
  NOTHING(nvinfer1::TensorFormat getTensorFormat(const char*) const,
          nvinfer1::TensorFormat::kLINEAR)
  NOTHING(const char* getTensorFormatDesc(const char*) const, "")
  NOTHING(int32_t getTensorVectorizedDim(const char*) const, -1)
  NOTHING(nvinfer1::HardwareCompatibilityLevel getHardwareCompatibilityLevel() const, {})
  NOTHING(int32_t getNbAuxStreams() const, 0)
  NOTHING(int32_t getTensorBytesPerComponentV2(const char*, int32_t) const, 0)
  NOTHING(int32_t getTensorComponentsPerElementV2(const char*, int32_t) const, 0)
  NOTHING(nvinfer1::TensorFormat getTensorFormatV2(const char*, int32_t) const,
          nvinfer1::TensorFormat::kLINEAR)
  NOTHING(const char* getTensorFormatDescV2(const char*, int32_t) const, "")
  NOTHING(int32_t getTensorVectorizedDimV2(const char*, int32_t) const, -1)
  NOTHING(nvinfer1::ISerializationConfig* createSerializationConfig(), nullptr)
  NOTHING(nvinfer1::IHostMemory* serializeWithConfig(nvinfer1::ISerializationConfig&) const,
          nullptr)
  NOTHING(size_t getDeviceMemorySizeForProfile(int32_t) const, 0)
  NOTHING(nvinfer1::IRefitter* createRefitter(nvinfer1::ILogger&), nullptr)
  NOTHING(bool setWeightStreamingBudget(int64_t), false)
  NOTHING(int64_t getWeightStreamingBudget() const, 0)
  NOTHING(int64_t getMinimumWeightStreamingBudget() const, 0)
  NOTHING(int64_t getStreamableWeightsSize() const, 0)
  NOTHING(bool isDebugTensor(const char*) const, false)
  NOTHING(bool setWeightStreamingBudgetV2(int64_t), false)
  NOTHING(int64_t getWeightStreamingBudgetV2() const, 0)
  NOTHING(int64_t getWeightStreamingAutomaticBudget() const, 0)
  NOTHING(int64_t getWeightStreamingScratchMemorySize() const, 0)
  NOTHING(int64_t getDeviceMemorySizeV2() const, 0)
  NOTHING(const int64_t* getProfileTensorValuesV2(const char*, int32_t, OptProfileSelector) const,
          nullptr)
  NOTHING(nvinfer1::IExecutionContext* createExecutionContextWithRuntimeConfig(
              nvinfer1::IRuntimeConfig*),
          nullptr)
  NOTHING(nvinfer1::IRuntimeConfig* createRuntimeConfig(), nullptr)
  NOTHING(int64_t getEngineStat(nvinfer1::EngineStat) const, 0)

 private:
  const Tensor& find(const std::string& name) const { return *const_cast<Plan&>(plan_).find(name); }

  const Plan plan_;
  nvinfer1::ILogger& logger_;
};

class MockRuntime final : public nvinfer1::IRuntime, public nvinfer1::apiv::VRuntime {
 public:
  explicit MockRuntime(nvinfer1::ILogger& logger) : logger_(logger) { mImpl = this; }

  nvinfer1::ICudaEngine* deserializeCudaEngine(const void* blob,
                                               std::size_t size) noexcept override {
    Plan plan;
    if (!mock::note("deserializeCudaEngine") &&
        plan.read(std::string(static_cast<const char*>(blob), size)))
      return new MockEngine(std::move(plan), logger_);
    logger_.log(nvinfer1::ILogger::Severity::kERROR,
                "the plan's magic tag does not match\nsecond line");
    logger_.log(nvinfer1::ILogger::Severity::kERROR, "and what follows from it");
    return nullptr;
  }

  NOTHING(nvinfer1::IRuntime* getPImpl(), this)
  NOTHING(nvinfer1::ICudaEngine* deserializeCudaEngine(nvinfer1::IStreamReader&), nullptr)
  NOTHING(void setDLACore(int32_t), )
  NOTHING(int32_t getDLACore() const, 0)
  NOTHING(int32_t getNbDLACores() const, 0)
  NOTHING(void setGpuAllocator(nvinfer1::IGpuAllocator*), )
  NOTHING(void setErrorRecorder(nvinfer1::IErrorRecorder*), )
  NOTHING(nvinfer1::IErrorRecorder* getErrorRecorder() const, nullptr)
  NOTHING(nvinfer1::ILogger* getLogger() const, &logger_)
  NOTHING(bool setMaxThreads(int32_t), false)
  NOTHING(int32_t getMaxThreads() const, 1)
  NOTHING(void setTemporaryDirectory(const char*), )
  NOTHING(const char* getTemporaryDirectory() const, "")
  NOTHING(void setTempfileControlFlags(nvinfer1::TempfileControlFlags), )
  NOTHING(nvinfer1::TempfileControlFlags getTempfileControlFlags() const, 0)
  nvinfer1::IPluginRegistry& getPluginRegistry() noexcept override { std::abort(); }
  NOTHING(void setPluginRegistryParent(nvinfer1::IPluginRegistry*), )
  NOTHING(nvinfer1::IRuntime* loadRuntime(const char*), nullptr)
  NOTHING(void setEngineHostCodeAllowed(bool), )
  NOTHING(bool getEngineHostCodeAllowed() const, false)
  NOTHING(nvinfer1::ICudaEngine* deserializeCudaEngineV2(nvinfer1::IStreamReaderV2&), nullptr)

 private:
  nvinfer1::ILogger& logger_;
};

// Returns the number at index `place` of the version, such as 10 at index 0 of 10.14.1.48.
int32_t version(int place) {
  const char* const given = std::getenv("MOCK_TRT_VERSION");
  int32_t numbers[4] = {};
  std::sscanf(given != nullptr ? given : "10.14.1.48", "%d.%d.%d.%d", &numbers[0], &numbers[1],
              &numbers[2], &numbers[3]);
  return numbers[place];
}

}  // namespace

extern "C" {

int32_t getInferLibMajorVersion() noexcept { return version(0); }
int32_t getInferLibMinorVersion() noexcept { return version(1); }
int32_t getInferLibPatchVersion() noexcept { return version(2); }
int32_t getInferLibBuildVersion() noexcept { return version(3); }

#ifndef MOCK_LEAN
void* createInferBuilder_INTERNAL(void*, int32_t) noexcept { return nullptr; }
#endif

void* createInferRuntime_INTERNAL(void* logger, int32_t) noexcept {
  if (mock::note("createInferRuntime")) {
    // TensorRT 11.4 fails in this way if the driver is too old.
    static_cast<nvinfer1::ILogger*>(logger)->log(nvinfer1::ILogger::Severity::kERROR,
                                                 "CUDA initialization failure with error: 35");
    return reinterpret_cast<void*>(0x228);
  }
  return static_cast<nvinfer1::IRuntime*>(
      new MockRuntime(*static_cast<nvinfer1::ILogger*>(logger)));
}

}  // extern "C"
