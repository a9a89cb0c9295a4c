// griddepcontrol (PTX ISA 9.7.13.13): programmatic dependent launch. GPUs before compute capability 9.0 have none;
// there a kernel starts when the one before it is complete.
#pragma once

namespace flash_ext::ptx {

// Until the grids that this one depends on are complete and what they wrote is visible. Returns at once in a grid that
// was launched without cudaLaunchAttributeProgrammaticStreamSerialization.
__device__ __forceinline__ void griddepcontrol_wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Once every CTA of the grid has said so (or is done), the CTAs of the dependent grid may start beside it.
__device__ __forceinline__ void griddepcontrol_launch_dependents() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace flash_ext::ptx
