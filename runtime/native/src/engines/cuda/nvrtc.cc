#include "engines/cuda/nvrtc.h"

#include <dlfcn.h>

#include <iterator>
#include <memory>
#include <type_traits>
#include <vector>

#include "base/dynamic_library.h"
#include "base/error.h"
#include "base/one_line.h"
#include "engines/cuda/draw_kernel_text.h"

namespace dlm {
namespace {

constexpr char kNvrtcAdvice[] =
    "pip's onnxruntime-gpu[cuda] installs it (nvidia-cuda-nvrtc). For another, set DLM_NVRTC to "
    "the path of libnvrtc.so.";

// The parts of the C library's headers that the kernel uses. NVRTC does not have these headers.
constexpr char kIntegers[] =
    "using int32_t = int; using int64_t = long long;\n"
    "using uint32_t = unsigned; using uint64_t = unsigned long long;\n";
constexpr char kMath[] =
    "#define HUGE_VAL __longlong_as_double(0x7ff0000000000000ll)\n"
    "#define HUGE_VALF __int_as_float(0x7f800000)\n";

using Program = struct _nvrtcProgram*;

// The functions of NVRTC. The result of each function is an nvrtcResult, which is 0 for success.
struct Nvrtc {
  int (*nvrtcCreateProgram)(Program*, const char* source, const char* name, int headers,
                            const char* const* texts, const char* const* names);
  int (*nvrtcCompileProgram)(Program, int options, const char* const* list);
  int (*nvrtcGetCUBINSize)(Program, size_t*);
  int (*nvrtcGetCUBIN)(Program, char*);
  int (*nvrtcGetProgramLogSize)(Program, size_t*);
  int (*nvrtcGetProgramLog)(Program, char*);
  int (*nvrtcDestroyProgram)(Program*);
};

Nvrtc load_nvrtc() {
  std::string library;
  void* const handle = open_library(
      {"NVRTC", "DLM_NVRTC", {"libnvrtc.so.13", "libnvrtc.so.12"}, kNvrtcAdvice}, "", &library);
  Nvrtc nvrtc{};
  const auto load = [&](auto& function, const char* name) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(handle, name));
    if (function == nullptr)
      throw Error(DLM_ENGINE_MISSING, library + " has no " + name + ". " + kNvrtcAdvice);
  };
  load(nvrtc.nvrtcCreateProgram, "nvrtcCreateProgram");
  load(nvrtc.nvrtcCompileProgram, "nvrtcCompileProgram");
  load(nvrtc.nvrtcGetCUBINSize, "nvrtcGetCUBINSize");
  load(nvrtc.nvrtcGetCUBIN, "nvrtcGetCUBIN");
  load(nvrtc.nvrtcGetProgramLogSize, "nvrtcGetProgramLogSize");
  load(nvrtc.nvrtcGetProgramLog, "nvrtcGetProgramLog");
  load(nvrtc.nvrtcDestroyProgram, "nvrtcDestroyProgram");
  return nvrtc;
}

}  // namespace

std::string compile_draw_kernel(int32_t sm) {
  const Nvrtc nvrtc = load_nvrtc();
  const char* const texts[] = {kGumbelText, kRandomText, kDrawsText, kIntegers, kMath, ""};
  const char* const names[] = {"base/gumbel.h", "base/random.h", "engines/draws.h",
                               "cstdint",       "math.h",        "string.h"};
  const std::string arch = "--gpu-architecture=sm_" + std::to_string(sm);
  // Without the second option, products and sums would be rounded once, unlike on the host.
  const char* const options[] = {arch.c_str(), "--fmad=false", "--std=c++17",
                                 "--device-as-default-execution-space"};
  Program program = nullptr;
  const auto check = [&](int result, const char* call) {
    if (result == 0) return;
    size_t bytes = 0;
    std::string log;
    if (program != nullptr && nvrtc.nvrtcGetProgramLogSize(program, &bytes) == 0 && bytes > 1) {
      log.resize(bytes);
      nvrtc.nvrtcGetProgramLog(program, log.data());
    }
    throw Error(DLM_ENGINE_MISSING, std::string("NVRTC: ") + call + " failed for SM " +
                                        std::to_string(sm) + " (" + std::to_string(result) +
                                        "): " + one_line(log.c_str()));
  };
  check(nvrtc.nvrtcCreateProgram(&program, kDrawKernelText, "draw_kernel.h",
                                 static_cast<int>(std::size(names)), texts, names),
        "nvrtcCreateProgram");
  const auto destroy = [&](Program* one) { nvrtc.nvrtcDestroyProgram(one); };
  const std::unique_ptr<Program, decltype(destroy)> owner(&program, destroy);
  check(nvrtc.nvrtcCompileProgram(program, static_cast<int>(std::size(options)), options),
        "nvrtcCompileProgram");
  size_t bytes = 0;
  check(nvrtc.nvrtcGetCUBINSize(program, &bytes), "nvrtcGetCUBINSize");
  std::string code(bytes, '\0');
  check(nvrtc.nvrtcGetCUBIN(program, code.data()), "nvrtcGetCUBIN");
  return code;
}

}  // namespace dlm
