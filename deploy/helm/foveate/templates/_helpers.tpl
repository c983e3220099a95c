{{- define "foveate.name" -}}{{ printf "%s-foveate" .Release.Name | trunc 50 | trimSuffix "-" }}{{- end }}
{{- define "foveate.labels" -}}
app.kubernetes.io/name: foveate
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}
{{- define "foveate.selector" -}}
app.kubernetes.io/name: foveate
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}
{{- define "foveate.security" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}
{{- define "foveate.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
seccompProfile: {type: RuntimeDefault}
{{- end }}
{{- define "foveate.env" -}}
- {name: OTEL_METRICS_EXPORTER, value: none}
{{- with .Values.redis.url }}
- {name: FOVEATE_REDIS, value: {{ . | quote }}}
{{- end }}
{{- if .Values.telemetry.otlpEndpoint }}
- {name: OTEL_EXPORTER_OTLP_ENDPOINT, value: {{ .Values.telemetry.otlpEndpoint | quote }}}
- {name: OTEL_TRACES_SAMPLER, value: parentbased_traceidratio}
- {name: OTEL_TRACES_SAMPLER_ARG, value: {{ .Values.telemetry.sampleRatio | quote }}}
{{- end }}
{{- if .Values.tls.secret }}
- {name: FOVEATE_TLS_CERT, value: /tls/tls.crt}
- {name: FOVEATE_TLS_KEY, value: /tls/tls.key}
{{- end }}
{{- end }}
{{- define "foveate.engineEnv" -}}
{{ include "foveate.env" . }}
{{- if .Values.tls.secret }}
- {name: FOVEATE_TLS_CLIENT_CA, value: /tls/ca.crt}
{{- end }}
- {name: FOVEATE_MODEL, value: {{ .Values.engine.modelPath | quote }}}
- {name: FOVEATE_DEVICE, value: {{ .Values.engine.device | quote }}}
- {name: FOVEATE_DTYPE, value: {{ .Values.engine.dtype | quote }}}
- {name: FOVEATE_POOL_MIB, value: {{ .Values.engine.poolMib | quote }}}
{{- end }}
{{- define "foveate.engineMounts" -}}
- {name: shm, mountPath: /dev/shm}
- {name: model, mountPath: /models, readOnly: true}
- {name: tmp, mountPath: /tmp}
{{- if .Values.tls.secret }}
- {name: tls, mountPath: /tls, readOnly: true}
{{- end }}
{{- end }}
{{- define "foveate.probes" -}}
{{- if .secret }}
# The kubelet's gRPC probe speaks no TLS: with TLS the port is probed, and readiness asks the service itself.
startupProbe: {tcpSocket: {port: {{ .port }}}, periodSeconds: 5, failureThreshold: 120}
livenessProbe: {tcpSocket: {port: {{ .port }}}, periodSeconds: 10}
readinessProbe:
  exec:
    command: [foveate, health, "127.0.0.1:{{ .port }}", --ca, /tls/ca.crt, --cert, /tls/tls.crt, --key, /tls/tls.key, --name, {{ .name | quote }}]
  periodSeconds: 10
  timeoutSeconds: 5
{{- else }}
startupProbe: {tcpSocket: {port: {{ .port }}}, periodSeconds: 5, failureThreshold: 120}
livenessProbe: {tcpSocket: {port: {{ .port }}}, periodSeconds: 10}
readinessProbe: {grpc: {port: {{ .port }}}, periodSeconds: 5}
{{- end }}
{{- end }}
