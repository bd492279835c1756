// The TensorRT engine. This file chooses one of a bundle's engine files, and checks it against the
// manifest.
//
// An engine file works only with certain compute capabilities and one version of TensorRT. This
// file first checks that the device and the loaded library match. Then it compares the engine's
// ports (inputs and outputs) and profiles with the manifest, because the sizes of the buffers come
// from the manifest.
#include "engines/tensorrt/tensorrt_engine.h"

#include "base/error.h"
#include "base/mapped_file.h"

namespace dlm::trt {
namespace {

// Chooses the engine that can run on this device with the loaded library. If no engine can run,
// throws an error that contains the reason for each engine.
const EngineSpec& choose_engine(const std::vector<EngineSpec>& engines, const Platform& platform) {
  std::string reasons;
  for (const EngineSpec& engine : engines) {
    const std::string reason = why_not(engine, platform);
    if (reason.empty()) return engine;
    reasons += (reasons.empty() ? "" : "; ") + engine.target + ": " + reason;
  }
  const std::string command = "`dlm-export engine " + engines.front().bundle + " --target sm" +
                              std::to_string(platform.sm) + "`";
  throw Error(DLM_UNSUPPORTED, "no engine of this bundle fits: " + reasons +
                                   ". Build one here with " + command +
                                   ", or open the bundle with engine \"onnxruntime\"");
}

// Converts an element type of TensorRT to the number that engines/graph_check.h uses. Returns 0
// if ports cannot have this type.
int32_t element_type(nvinfer1::DataType type) {
  using Type = nvinfer1::DataType;
  for (const auto& [theirs, ours] : {std::pair{Type::kFLOAT, kFloat},
                                     {Type::kHALF, kFloat16},
                                     {Type::kBF16, kBFloat16},
                                     {Type::kINT32, kInt32},
                                     {Type::kINT64, kInt64}})
    if (type == theirs) return ours;
  return 0;
}

Dims listed(const nvinfer1::Dims& dims) { return Dims(dims.d, dims.d + std::max(dims.nbDims, 0)); }

}  // namespace

nvinfer1::Dims dims_of(const Port& port, int32_t tokens, int32_t cached, int32_t rows) {
  const auto shape = port.shape(1, tokens, cached, rows, cached);
  nvinfer1::Dims out{};
  out.nbDims = static_cast<int32_t>(port.dims.size());
  std::copy_n(shape.begin(), port.dims.size(), out.d);
  return out;
}

TensorRt::TensorRt(const GraphSpec& graph, const std::vector<EngineSpec>& engines,
                   const std::string& library, const Log& log)
    : draw_kernel_(device_, log),
      graph_(graph),
      library_(load_library(library)),
      spec_(choose_engine(engines, {device_.sm(), kBuilder, library_.version, library_.is_lean})),
      ports_(list_ports(graph, 1)),
      logger_(log) {
  const CudaDevice::Use use(device_);
  void* const made = library_.create_runtime(&logger_, NV_TENSORRT_VERSION);
  // If the driver is too old, TensorRT 11.4 reports an error and returns an invalid pointer.
  if (const std::string reported = logger_.take(); made == nullptr || !reported.empty())
    throw Error(DLM_ENGINE_FAILED, std::string(kName) + ": createInferRuntime failed" + reported);
  runtime_.reset(static_cast<nvinfer1::IRuntime*>(made));
  {
    const MappedFile file(spec_.path, DLM_BAD_BUNDLE, false);
    engine_.reset(runtime_->deserializeCudaEngine(file.data(), file.bytes()));
  }
  if (engine_ == nullptr)
    throw Error(DLM_ENGINE_FAILED,
                spec_.path + ": " + kName + " " + library_.version + " cannot load it" +
                    logger_.take() +
                    ". If memory is not the reason, build it again: dlm-export engine " +
                    spec_.bundle + " --target " + spec_.target + " --force");
  verify_ports();
  verify_profiles();
}

TensorRt::~TensorRt() {
  const CudaDevice::Use use(device_, std::nothrow);
  engine_.reset();
  runtime_.reset();
}

std::string TensorRt::description() const {
  return std::string(kBuilder) + " " + library_.version + " (" + device_.name() + ", SM " +
         sm_text(device_.sm()) + ", engine " + spec_.target + ")";
}

int32_t TensorRt::max_rows(int32_t tokens, int32_t cached) const {
  const int32_t profile = choose_profile(spec_, tokens, cached);
  return profile < 0 ? 0 : (profile == 0 ? spec_.prefill : spec_.block).rows.largest;
}

std::unique_ptr<Context> TensorRt::open_context(int32_t) { return open_session(*this); }

std::unique_ptr<nvinfer1::IExecutionContext> TensorRt::create_context() {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::unique_ptr<nvinfer1::IExecutionContext> context(
      engine_->createExecutionContext(nvinfer1::ExecutionContextAllocationStrategy::kUSER_MANAGED));
  if (context == nullptr) fail_call("createExecutionContext");
  return context;
}

void TensorRt::fail_call(const std::string& call) {
  throw Error(DLM_ENGINE_FAILED, std::string(kName) + ": " + call + " failed" + logger_.take());
}

// Throws an error if a port of the engine differs from the manifest in type, shape or kind of
// memory.
void TensorRt::verify_ports() {
  for (int32_t i = 0; i < engine_->getNbIOTensors(); ++i) {
    const std::string name = engine_->getIOTensorName(i);
    const bool is_input = engine_->getTensorIOMode(name.c_str()) == nvinfer1::TensorIOMode::kINPUT;
    const char* const kind = is_input ? "input" : "output";
    Port* const port = find_port(is_input ? ports_.inputs : ports_.outputs, name);
    if (port == nullptr) refuse_port(spec_.path, kind, name, "is not known to this runtime");
    if (engine_->getTensorLocation(name.c_str()) != nvinfer1::TensorLocation::kDEVICE)
      refuse_port(spec_.path, kind, name, "must be in device memory");
    note_port(spec_.path, kind, *port, element_type(engine_->getTensorDataType(name.c_str())),
              listed(engine_->getTensorShape(name.c_str())));
  }
  check_complete(spec_.path, "input", ports_.inputs);
  check_complete(spec_.path, "output", ports_.outputs);
}

// Throws an error if the engine's profiles differ from the profiles in the manifest. The sizes of
// the buffers come from the manifest, so an engine with larger profiles would write beyond the
// buffers.
void TensorRt::verify_profiles() const {
  if (engine_->getNbOptimizationProfiles() != 2)
    fail(DLM_BAD_BUNDLE, "%s: has %d profiles instead of 2", spec_.path.c_str(),
         engine_->getNbOptimizationProfiles());
  const Profile* const profiles[] = {&spec_.prefill, &spec_.block};
  for (int32_t i = 0; i < 2; ++i) {
    const Profile& p = *profiles[i];
    for (const Port& port : ports_.inputs) {
      const auto verify = [&](nvinfer1::OptProfileSelector end, const char* what,
                              const nvinfer1::Dims& wanted) {
        const Dims there = listed(engine_->getProfileShape(port.name.c_str(), i, end));
        if (there == listed(wanted)) return;
        fail(DLM_BAD_BUNDLE, "%s: the %s \"%s\" of profile %d differs from the manifest's",
             spec_.path.c_str(), what, port.name.c_str(), i);
      };
      using Selector = nvinfer1::OptProfileSelector;
      verify(Selector::kMIN, "smallest",
             dims_of(port, p.tokens.smallest, p.cached.smallest, p.rows.smallest));
      verify(Selector::kMAX, "largest",
             dims_of(port, p.tokens.largest, p.cached.largest, p.rows.largest));
    }
  }
}

}  // namespace dlm::trt

namespace dlm {

std::unique_ptr<Engine> open_tensorrt(const GraphSpec& graph,
                                      const std::vector<EngineSpec>& engines,
                                      const std::string& library, const Log& log) {
  return std::make_unique<trt::TensorRt>(graph, engines, library, log);
}

}  // namespace dlm
