"""The public names and where they are defined; ``__init__.py`` loads each on its first use."""

from . import (
    analysis as analysis,
    anatomy as anatomy,
    closed_form as closed_form,
    engines as engines,
    figures as figures,
    operators as operators,
    parallel as parallel,
    problem as problem,
    report as report,
    runs as runs,
    spectra as spectra,
    theory as theory,
    training as training,
    zoo as zoo,
)
from .analysis.atlas.attention import (
    AttentionCurvature as AttentionCurvature,
    analyze_attention_curvature as analyze_attention_curvature,
)
from .analysis.atlas.entries import (
    Entries as Entries,
    entries as entries,
)
from .analysis.atlas.layerwise import (
    ModuleWiseCurvature as ModuleWiseCurvature,
    module_wise_curvature as module_wise_curvature,
)
from .analysis.atlas.mapping import atlas as atlas
from .analysis.atlas.result import (
    Atlas as Atlas,
    AtlasMap as AtlasMap,
    RankedBlock as RankedBlock,
)
from .analysis.conditioning import EffectiveConditioning as EffectiveConditioning
from .analysis.diagnostics import (
    ConvergenceTrajectory as ConvergenceTrajectory,
    Rate as Rate,
)
from .analysis.landscape.ascent import (
    Sharpness as Sharpness,
    sharpness_by_ascent as sharpness_by_ascent,
)
from .analysis.landscape.convergence import (
    LandscapeConvergence as LandscapeConvergence,
    landscape_convergence as landscape_convergence,
)
from .analysis.landscape.flatness import (
    Flatness as Flatness,
    Invariance as Invariance,
    RelativeFlatness as RelativeFlatness,
    flatness as flatness,
    relative_flatness as relative_flatness,
    rescaling_invariance as rescaling_invariance,
)
from .analysis.landscape.pac_bayes import (
    PacBayes as PacBayes,
    pac_bayes as pac_bayes,
)
from .analysis.landscape.rescaling import rescaled as rescaled
from .analysis.landscape.sharpness import (
    SharpnessDrift as SharpnessDrift,
    sharpness_drift as sharpness_drift,
)
from .analysis.landscape.taylor_result import (
    CriticalLearningRate as CriticalLearningRate,
    ObservedCurvature as ObservedCurvature,
    PredictedTrajectory as PredictedTrajectory,
    TaylorExpansion as TaylorExpansion,
    TrustRadius as TrustRadius,
)
from .analysis.propagation.analyzer import (
    CurvaturePropagationAnalyzer as CurvaturePropagationAnalyzer,
)
from .analysis.propagation.result import (
    CurvatureFlow as CurvatureFlow,
    FlowEntry as FlowEntry,
)
from .anatomy import (
    Anatomy as Anatomy,
    Selection as Selection,
    Slice as Slice,
    anatomy_of as anatomy_of,
)
from .article import (
    ConvergenceDiagnostics as ConvergenceDiagnostics,
    FullHessianAnalysis as FullHessianAnalysis,
    LayerWiseCurvature as LayerWiseCurvature,
    NormVerification as NormVerification,
    ScalingLawAnalyzer as ScalingLawAnalyzer,
    TaylorExpansionAnalyzer as TaylorExpansionAnalyzer,
    TransformerHessianAnalyzer as TransformerHessianAnalyzer,
    demo_hessian_analysis as demo_hessian_analysis,
    verify_layernorm_hessian as verify_layernorm_hessian,
)
from .closed_form.hessian import BlockDerivatives as BlockDerivatives
from .closed_form.modules import (
    AttentionMoments as AttentionMoments,
    FeedForwardJacobians as FeedForwardJacobians,
    FFNHessian as FFNHessian,
    LayerNormHessian as LayerNormHessian,
    RMSNormHessian as RMSNormHessian,
    SelfAttentionHessian as SelfAttentionHessian,
    TransformerBlockHessian as TransformerBlockHessian,
)
from .closed_form.result import BlockHessian as BlockHessian
from .engines.tangent.head import Readout as Readout
from .engines.tangent.stack import (
    BlockStack as BlockStack,
    LinearisedStack as LinearisedStack,
)
from .figures import (
    plot_scaling_law_predictions as plot_scaling_law_predictions,
    visualize_curvature_flow as visualize_curvature_flow,
    visualize_hessian_spectrum as visualize_hessian_spectrum,
)
from .fits import (
    PlanePowerLaw as PlanePowerLaw,
    PowerLaw as PowerLaw,
    ScalingLaw as ScalingLaw,
)
from .linear_operator import (
    BlockDiagonalOperator as BlockDiagonalOperator,
    DiagonalOperator as DiagonalOperator,
    IdentityOperator as IdentityOperator,
    KroneckerOperator as KroneckerOperator,
    LinearOperator as LinearOperator,
    MatrixOperator as MatrixOperator,
    Tags as Tags,
)
from .operators.curvature import (
    CurvatureOperator as CurvatureOperator,
    FunctionalHessian as FunctionalHessian,
    GaussNewton as GaussNewton,
    Hessian as Hessian,
)
from .operators.fisher import Fisher as Fisher
from .operators.jacobian import Jacobian as Jacobian
from .operators.kfac import (
    EKFAC as EKFAC,
    KFAC as KFAC,
)
from .operators.third_derivative import (
    HessianDerivative as HessianDerivative,
    ThirdDerivative as ThirdDerivative,
)
from .planning import (
    Plan as Plan,
    PlannedOption as PlannedOption,
    plan as plan,
)
from .problem import Problem as Problem
from .report.comparing import (
    Comparison as Comparison,
    StateChange as StateChange,
    compare as compare,
)
from .report.page import training_page as training_page
from .results import (
    Result as Result,
    load as load,
)
from .runs import LoadedRun as LoadedRun
from .scaling import (
    DatasetPrediction as DatasetPrediction,
    GridPoint as GridPoint,
    HessianNorm as HessianNorm,
    PredictionComparison as PredictionComparison,
    ScalingCell as ScalingCell,
    ScalingGrid as ScalingGrid,
)
from .spectra.density import spectral_density as spectral_density
from .spectra.density_result import SpectralDensity as SpectralDensity
from .spectra.diagonal import (
    DiagonalEstimate as DiagonalEstimate,
    diagonal as diagonal,
)
from .spectra.eigen_result import Eigenpairs as Eigenpairs
from .spectra.eigenpairs import eigenpairs as eigenpairs
from .spectra.estimate import Estimate as Estimate
from .spectra.functions import (
    FunctionProduct as FunctionProduct,
    log_determinant as log_determinant,
    matrix_function as matrix_function,
    quadratic_form as quadratic_form,
    trace_function as trace_function,
)
from .spectra.norms import (
    frobenius_norm as frobenius_norm,
    spectral_norm as spectral_norm,
)
from .spectra.preconditioners import (
    LowRankInverse as LowRankInverse,
    cholesky_preconditioner as cholesky_preconditioner,
    nystrom_preconditioner as nystrom_preconditioner,
)
from .spectra.solve import (
    Solution as Solution,
    inverse as inverse,
    inverse_diagonal as inverse_diagonal,
    least_squares as least_squares,
    solve as solve,
)
from .spectra.summary import (
    CurvatureSummary as CurvatureSummary,
    DensityComparison as DensityComparison,
    Participation as Participation,
    compare_densities as compare_densities,
    curvature_summary as curvature_summary,
    participation as participation,
)
from .spectra.trace import trace as trace
from .spectra.trust_region import (
    NewtonStep as NewtonStep,
    newton_step as newton_step,
)
from .studies.claims import (
    ClaimReport as ClaimReport,
    examine_claims as examine_claims,
)
from .studies.gauss_newton import (
    Approximation as Approximation,
    Distance as Distance,
    GaussNewtonComparison as GaussNewtonComparison,
    GaussNewtonQuality as GaussNewtonQuality,
    compare_gauss_newton as compare_gauss_newton,
    gauss_newton_quality as gauss_newton_quality,
)
from .studies.generalisation import (
    Generalisation as Generalisation,
    MeasureCorrelation as MeasureCorrelation,
    examine_generalisation as examine_generalisation,
    rank_correlations as rank_correlations,
)
from .studies.growth import (
    Growth as Growth,
    growth as growth,
)
from .studies.papers import (
    Finding as Finding,
    Reproduction as Reproduction,
    paper as paper,
)
from .studies.retraining import (
    RetrainedConvergence as RetrainedConvergence,
    retrained_convergence as retrained_convergence,
)
from .studies.sinks import (
    SinkLevel as SinkLevel,
    Sinks as Sinks,
    SinkStudy as SinkStudy,
    sinks as sinks,
    sinks_over_seeds as sinks_over_seeds,
)
from .surveying import (
    SurveyPlan as SurveyPlan,
    plan_survey as plan_survey,
    survey as survey,
)
from .theory.scalar_attention import (
    ScalarAttentionSpectrum as ScalarAttentionSpectrum,
    scalar_attention_spectrum as scalar_attention_spectrum,
)
from .training.alarms import Thresholds as Thresholds
from .training.compression import (
    BitAllocation as BitAllocation,
    CostTable as CostTable,
    PartCost as PartCost,
    Quantization as Quantization,
    QuantizationTable as QuantizationTable,
    allocate_bits as allocate_bits,
    pruning_costs as pruning_costs,
    quantization_table as quantization_table,
    quantize as quantize,
    rounding_costs as rounding_costs,
)
from .training.monitor import Monitor as Monitor
from .training.optimizer import (
    AdaptedStep as AdaptedStep,
    CurvatureAwareOptimizer as CurvatureAwareOptimizer,
    LocalCurvature as LocalCurvature,
)
from .training.pruning import (
    Pruning as Pruning,
    QuantizationSensitivity as QuantizationSensitivity,
    prune as prune,
    quantization_sensitivity as quantization_sensitivity,
)
from .training.snapshot import (
    CurvatureHistory as CurvatureHistory,
    EarlyBlocks as EarlyBlocks,
    Snapshot as Snapshot,
)

__version__: str
