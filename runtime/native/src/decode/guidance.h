// Classifier-free guidance: moves predictions away from those without the prompt.
//
// l = l_u + (w + 1)(l_c - l_u), l_u being the logits of a canvas whose given tokens are masked, as
// in LLaDA's loop (arXiv:2502.09992). One pass runs both canvases.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "decode/proposer.h"
#include "engines/engine.h"

namespace dlm {

// Guided rows, with the candidates and entropies that an engine would give of them.
class Guided {
 public:
  // Of `rows` rows: what a pass predicted with the prompt, and the logits [rows, V] without it. A
  // row with a logit of NaN or +infinity, or with -infinity alone, gets probabilities of NaN.
  Predictions guide(const Denoiser& denoiser, double scale, const Predictions& conditional,
                    const float* unconditional, size_t rows);

 private:
  void rank(const Denoiser& denoiser, size_t row);

  std::vector<float> logits_, probs_, entropy_;
  std::vector<int32_t> tokens_;
};

}  // namespace dlm
